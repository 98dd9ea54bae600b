"""Schemas, configurations and command lines of any content give a value, or an error that names what is wrong."""

from __future__ import annotations

import json
import string
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from replay_server_protocol.errors import InvalidRequest, ReplayError, SchemaMismatch
from replay_server_protocol.schema import DTYPES, ROLES, Schema
from support.markers import MARKERS

from replay_server.cli import main
from replay_server.config import ServerConfig

OPTIONS = sorted(name.replace("_", "-") for name in ServerConfig.__dataclass_fields__)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40) | st.just(10**400)
plain = st.recursive(
    scalars, lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(max_size=12), part, max_size=4), max_leaves=12
)
names = st.sampled_from(["a", "reward", "next_a", "a.b", "1", "", "x" * 65, "_lap", *ROLES]) | st.text(max_size=8)
wire_fields = st.lists(
    st.one_of(st.sampled_from(sorted(DTYPES)), names, st.lists(st.integers(-1, 2**70), max_size=9), st.booleans(), plain), max_size=6
) | st.tuples(names, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 2**24), max_size=9)).map(list)
wires = st.fixed_dictionaries(
    {}, optional={"fields": st.lists(wire_fields, max_size=6) | plain, "roles": st.dictionaries(names, names) | plain, "pairs": plain}
)


def deep(depth: int, opens: str = "[", closes: str = "]") -> str:
    return opens * depth + closes * depth


@given(wires | plain)
@settings(max_examples=300)
def test_a_wire_schema_is_one_or_a_mismatch(wire: Any) -> None:
    with suppress(SchemaMismatch):
        schema = Schema.from_wire(wire)
        assert Schema.from_wire(schema.to_wire()) == schema


@given(st.binary(max_size=200) | plain.map(lambda value: json.dumps(value, default=str).encode()))
@example(deep(100_000).encode())
@example(deep(100_000, '{"fields":').encode())
@example(b'{"fields": [["a", "float32", [' + b"9" * 5000 + b"]]]}")
@example(b"[" * 2_000_000)
@example(b"1" * 5000)
@example(b'{"fields": [["a", "float32", [1e999]]]}')
def test_a_schema_file_is_one_or_a_mismatch_that_names_the_file(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "schema.json"
    path.write_bytes(content)
    with pytest.raises(SchemaMismatch, match=r"--schema .*schema\.json"):
        ServerConfig(schema=str(path)).load_schema()


toml_values = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.booleans().map(lambda value: str(value).lower()),
    st.text(string.printable, max_size=20).map(json.dumps),
    st.lists(st.text(string.ascii_letters, max_size=8), max_size=3).map(json.dumps),
    st.sampled_from(["0x" + "f" * 5000, "9" * 5000, "1e400", "nan", "-inf", "2020-01-01", "{}", "[[1], 2]", "'auto'", '"none"', '"40GiB"']),
)
toml_lines = st.builds(lambda key, value: f"{key} = {value}", st.sampled_from(OPTIONS) | st.text("abc-_.[]", max_size=5), toml_values)


@given(st.lists(toml_lines, max_size=4).map("\n".join) | st.text(max_size=80))
@settings(max_examples=300)
@example("columns = " + deep(10_000))
@example("seed = " + "9" * 5000)
@example("seed = 0x" + "f" * 5000)
@example("lease = 1" + "0" * 400)
@example("a." * 30_000 + "a = 1")
@example("x = {" + "a." * 30_000 + "a = 1}")
@example("[" + "a." * 30_000 + "a]")
@example("#" * 2_000_000)
@example("\0")
def test_a_config_file_is_one_or_an_invalid_request(tmp_path_factory: pytest.TempPathFactory, content: str) -> None:
    path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_text(content, "utf-8", errors="surrogateescape")
    with suppress(InvalidRequest):
        assert isinstance(ServerConfig.from_options({}, str(path)), ServerConfig)


def test_files_that_have_no_end_or_no_name_are_refused() -> None:
    for path in ("/dev/zero", "a\0b", "/", "/proc/self/mem"):
        with pytest.raises(InvalidRequest, match="--config"):
            ServerConfig.from_options({}, path)
        with pytest.raises(SchemaMismatch, match="--schema"):
            ServerConfig(schema=path).load_schema()


texts = st.one_of(
    st.sampled_from(
        ["", "0", "-1", "1", "nan", "inf", "-inf", "1e400", "1e-400", "9" * 5000, "²", "٣", "1_0", "40GiB", "0KB", "auto", "none"]
    ),
    st.sampled_from(["link,priority", ",", "cuda:0", "cuda:²", "\udcff", "a\0b", "../..", "x" * 5000]),
    st.text(max_size=20),
)


@given(st.dictionaries(st.sampled_from(OPTIONS), texts, max_size=4))
@settings(max_examples=300)
def test_serve_options_are_right_or_refused_with_an_exit_code(tmp_path_factory: pytest.TempPathFactory, options: dict[str, str]) -> None:
    """--dry-run, so nothing is served; argparse refuses by SystemExit(2)."""
    base = tmp_path_factory.getbasetemp()
    (base / "whole.json").write_text(json.dumps(MARKERS.to_wire()), "utf-8")
    arguments = [f"--{name}={text}" for name, text in {"schema": str(base / "whole.json"), "device": "cpu", **options}.items()]
    try:
        code = main(["serve", "--dry-run", *arguments])
    except SystemExit as exit_:
        code = 2 if exit_.code == 2 else -1
    assert 0 <= code <= 120


@pytest.mark.parametrize(
    "option", ["--interval=inf", "--interval=nan", "--interval=1e300", "--timeout=nan", "--timeout=-1", "--run-dir=a\0b"]
)
def test_options_of_status_are_refused_by_name(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", f"--run-dir={tmp_path}", "--timeout=0", "--watch", option]) != 0
    assert option.partition("=")[0].strip("-").replace("-", "") in capsys.readouterr().err.replace("_", "").replace(" ", "").replace(
        "directory", "dir"
    )


def test_no_error_of_a_config_is_a_bare_one() -> None:
    for value in (None, object(), {}, b"", 1j):
        with pytest.raises(ReplayError, match="--capacity"):
            ServerConfig.from_options({"capacity": value})
