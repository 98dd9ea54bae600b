"""Options: defaults, texts, the TOML file, and refusals that name the option."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_server_protocol.errors import InvalidRequest, SchemaMismatch
from replay_server_protocol.schema import Schema

from replay_server.config import ServerConfig, Size, default_headroom, parse_size, slot_rows_for


def test_texts_become_what_the_options_mean() -> None:
    config = ServerConfig.from_options(
        {
            "capacity": "1_000",
            "headroom": "64",
            "slot_rows": "auto",
            "columns": "link,priority",
            "moments": "reward,obs",
            "mailbox_bytes": "2MiB",
            "lease": "0.25",
            "seed": "-7",
        }
    )
    assert (config.capacity, config.headroom, config.slot_rows, config.seed) == (1000, 64, None, -7)
    assert (config.columns, config.moments) == (("link", "priority"), ("reward", "obs"))
    assert (config.mailbox_bytes, config.lease_ns) == (2 << 20, 250_000_000)
    assert ServerConfig.from_options({"capacity": "3GiB"}).capacity == Size(3 << 30)


def test_every_default_passes_its_own_check() -> None:
    assert ServerConfig.from_options({}) == ServerConfig()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"capacity": "0"}, "--capacity"),
        ({"capacity": "many"}, "--capacity"),
        ({"headroom": "0"}, "--headroom"),
        ({"headroom": "8", "slot_rows": "16"}, "--headroom"),
        ({"slot_rows": "0"}, "--slot-rows"),
        ({"depth": "0"}, "--depth"),
        ({"depth": "2.5"}, "--depth"),
        ({"max_collectors": "0"}, "--max-collectors"),
        ({"max_learners": "99999"}, "--max-learners"),
        ({"learning_starts": "11", "capacity": "10"}, "--learning-starts"),
        ({"samples_per_insert": "2"}, "--tolerance"),
        ({"samples_per_insert": "0", "tolerance": "1"}, "--samples-per-insert"),
        ({"samples_per_insert": "nan", "tolerance": "1"}, "--samples-per-insert"),
        ({"tolerance": "-1"}, "--tolerance"),
        ({"device": "gpu"}, "--device"),
        ({"storage": "disk"}, "--storage"),
        ({"columns": "link,color"}, "--columns color"),
        ({"nonfinite": "ignore"}, "--nonfinite"),
        ({"lease": "0"}, "--lease"),
        ({"lease": "nan"}, "--lease"),
        ({"lease": "soon"}, "--lease"),
        ({"mailbox_bytes": "2 parsecs"}, "--mailbox-bytes"),
        ({"seed": str(2**63)}, "--seed"),
        ({"log_level": "loud"}, "--log-level"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        ServerConfig.from_options(options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"capacity": "100k"}, "--capacity '100k': '100k' is neither a plain number like 100_000 nor a size like 512MiB or 40GB"),
        ({"depth": "two"}, "--depth 'two': a whole number is right"),
        ({"lease": "soon"}, "--lease 'soon': a number is right"),
    ],
)
def test_a_refusal_says_what_is_right_in_the_words_of_options(options: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ServerConfig.from_options(options)
    assert str(refused.value) == told


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('capacity = 5000\nslot-rows = 32\ndepth = 3\ncolumns = ["link"]\nlease = 1\nmailbox_bytes = "1MiB"\n')
    config = ServerConfig.from_options({"depth": "4"}, str(file))
    assert (config.capacity, config.slot_rows, config.depth, config.columns) == (5000, 32, 4, ("link",))
    assert (config.lease, config.mailbox_bytes, config.max_collectors) == (1, 1 << 20, 64)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("capasity = 10", "capasity"),
        ("[serve]\ncapacity = 10", "serve"),
        ("capacity = true", "--capacity"),
        ('depth = 1.5\nname = "x"', "--depth"),
        ("columns = 'link', 3", "toml"),
        ("columns = [1]", "--columns"),
        ("name = 3", "--name"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=named):
        ServerConfig.from_options({}, str(file))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"^--config /nowhere/server\.toml: No such file or directory$"):
        ServerConfig.from_options({}, "/nowhere/server.toml")
    with pytest.raises(SchemaMismatch, match=r"^--schema /nowhere/rows\.json: No such file or directory$"):
        ServerConfig(schema="/nowhere/rows.json").load_schema()


def test_every_option_has_a_help_text() -> None:
    assert all(option.metadata["help"] for option in fields(ServerConfig))


def test_the_schema_file_is_the_schemas_wire_form_in_json(tmp_path: Path) -> None:
    schema = Schema.of(obs=("float32", 3), reward="float32")
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema.to_wire()))
    loaded = ServerConfig(schema=str(file)).load_schema()
    assert loaded is not None
    assert loaded.fingerprint == schema.fingerprint
    file.write_text('{"fields": [["obs", "float33", [3]]]}')
    with pytest.raises(SchemaMismatch, match="float33"):
        ServerConfig(schema=str(file)).load_schema()
    with pytest.raises(SchemaMismatch, match="nowhere"):
        ServerConfig(schema=str(tmp_path / "nowhere")).load_schema()


@given(st.integers(1, 5000), st.one_of(st.none(), st.integers(1, 5000)))
def test_a_slot_holds_as_many_whole_steps_as_fit_and_at_least_one(lanes: int, given_rows: int | None) -> None:
    config = ServerConfig(slot_rows=given_rows)
    if given_rows is not None and lanes > given_rows:
        with pytest.raises(InvalidRequest, match=f"--slot-rows {lanes}"):
            slot_rows_for(config, lanes)
        return
    rows = slot_rows_for(config, lanes)
    most = given_rows if given_rows is not None else max(512, lanes)
    assert rows % lanes == 0
    assert most - lanes < rows <= most


@given(st.integers(1, 2**40), st.integers(1, 2**20))
def test_the_default_headroom_holds_two_slots_and_grows_to_its_limit(capacity: int, slot_rows: int) -> None:
    headroom = default_headroom(capacity, slot_rows)
    assert headroom == max(2 * slot_rows, min(capacity // 8, 131_072))


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("0", 0), ("17", 17), ("1_000", 1000), ("2KiB", 2048), ("2kb", 2000), ("512 MiB", 512 << 20), ("40GB", 40 * 10**9), ("1TiB", 1 << 40)],
)
def test_sizes_with_an_i_are_powers_of_1024(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "-1", "1.5GiB", "GiB", "12 XB", "1e6", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)
