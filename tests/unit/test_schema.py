from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_server_protocol.errors import SchemaMismatch
from replay_server_protocol.schema import CASTS, DTYPES, MAX_FIELDS, MAX_ROW_BYTES, Field, Schema

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}(\.[a-z0-9_]{1,4}){0,2}", fullmatch=True)
shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
fields = st.builds(Field, st.sampled_from(sorted(DTYPES)), shapes) | st.builds(Field, st.sampled_from(sorted(CASTS)), shapes, st.just(True))
layouts = st.dictionaries(names, fields, min_size=1, max_size=8).filter(lambda specs: not any("next_" in name for name in specs))

SCHEMA = Schema.of(
    obs=("float32", 98), action=("float32", (29,)), reward="float32", next_obs=("float32", 98), terminated="bool", truncated="bool"
)


@given(layouts)
def test_fields_are_aligned_in_order_and_without_overlap_in_a_row_padded_to_16(specs: dict[str, Field]) -> None:
    schema = Schema.of(specs)
    assert schema.names == tuple(specs)
    end = 0
    for field in schema:
        assert field.offset % field.numpy_dtype.itemsize == 0
        assert 0 <= field.offset - end < field.numpy_dtype.itemsize
        assert field.n_bytes == field.elements * field.numpy_dtype.itemsize
        end = field.end
    assert schema.stride % 16 == 0
    assert 0 <= schema.stride - end < 16
    assert schema.row_bytes == sum(field.n_bytes for field in schema)


@given(layouts)
def test_schema_survives_json(specs: dict[str, Field]) -> None:
    schema = Schema.of(specs)
    again = Schema.from_wire(json.loads(json.dumps(schema.to_wire())))
    assert again == schema
    assert (again.fingerprint, hash(again)) == (schema.fingerprint, hash(schema))
    assert schema.differences(again) == ""


@given(layouts, st.integers(0, 5))
def test_views_share_the_rows_memory_and_touch_only_their_field(specs: dict[str, Field], n_rows: int) -> None:
    schema = Schema.of(specs)
    for field in schema:
        rows = np.zeros((n_rows, schema.stride), np.uint8)
        view = field.view(rows)
        assert view.shape == (n_rows, *field.shape)
        assert view.dtype == field.numpy_dtype
        view[...] = np.full(field.numpy_dtype.itemsize, 1 if field.dtype == "bool" else 255, np.uint8).view(field.numpy_dtype)[0]
        assert rows[:, field.offset : field.end].all()
        assert not rows[:, : field.offset].any()
        assert not rows[:, field.end :].any()


def test_layout_of_the_documented_example_is_fixed() -> None:
    assert {field.name: (field.offset, field.n_bytes) for field in SCHEMA} == {
        "obs": (0, 392),
        "action": (392, 116),
        "reward": (508, 4),
        "next_obs": (512, 392),
        "terminated": (904, 1),
        "truncated": (905, 1),
    }
    assert (SCHEMA.row_bytes, SCHEMA.stride) == (906, 912)
    assert SCHEMA.fingerprint == Schema.of(SCHEMA_SPECS).fingerprint


SCHEMA_SPECS: dict[str, object] = {
    "obs": Field("float32", (98,)),
    "action": ("float32", 29),
    "reward": Field("float32", cast=True),
    "next_obs": ("float32", (98,)),
    "terminated": "bool",
    "truncated": "bool",
}


def test_fingerprint_is_the_same_in_another_process() -> None:
    source = f"from replay_server_protocol.schema import Schema; print(Schema.from_wire({SCHEMA.to_wire()!r}).fingerprint)"
    printed = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == SCHEMA.fingerprint


def test_roles_and_pairs_default_to_the_names() -> None:
    assert SCHEMA.roles == {"reward": "reward", "terminated": "terminated", "truncated": "truncated"}
    assert SCHEMA.pairs == {"obs": "next_obs"}
    nested = Schema.of({"obs": {"rgb": ("uint8", 3)}, "next_obs": {"rgb": ("uint8", 3)}, "aux": {"z": "int8", "next_z": "int8"}})
    assert nested.names == ("obs.rgb", "next_obs.rgb", "aux.z", "aux.next_z")
    assert nested.pairs == {"obs.rgb": "next_obs.rgb", "aux.z": "aux.next_z"}


def test_given_roles_and_pairs_win_over_the_names() -> None:
    schema = Schema.of(reward="float32", r="float64", a="int8", b="int8", roles={"reward": "r"}, pairs={"a": "b"})
    assert schema.role("reward").name == "r"
    assert schema.pairs == {"a": "b"}


def test_missing_role_is_refused_with_the_way_to_name_it() -> None:
    with pytest.raises(SchemaMismatch, match=r"no field has the role 'first'.*roles=\{'first': FIELD\}"):
        SCHEMA.role("first")


def test_missing_field_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(SchemaMismatch, match=r"no field 'rewards'.*obs, action, reward"):
        SCHEMA["rewards"]


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ({}, "1 to 256 fields"),
        ({f"f{i}": "bool" for i in range(MAX_FIELDS + 1)}, "1 to 256 fields"),
        ({"a b": "bool"}, "field name 'a b'"),
        ({"a..b": "bool"}, "field name 'a..b'"),
        ({"x" * 65: "bool"}, "at most 64"),
        ({3: "bool"}, "field name 3"),
        ({"a": "float31"}, "'a': dtype 'float31'"),
        ({"a": ("float32", (0,))}, "'a': shape"),
        ({"a": ("float32", (-1,))}, "'a': shape"),
        ({"a": ("float32", True)}, "'a': shape"),
        ({"a": ("float32", (1,) * 9)}, "at most 8"),
        ({"a": ("float32", 1.5)}, "field 'a'"),
        ({"a": 7}, 'give "dtype"'),
        ({"a": ("uint8", MAX_ROW_BYTES), "b": "bool"}, "'b' brings the row to"),
        ({"a.b": "bool", "a": {"b": "int8"}}, "'a.b' stands twice"),
    ],
)
def test_wrong_field_is_refused_by_name(specs: dict[Any, object], words: str) -> None:
    with pytest.raises(SchemaMismatch, match=words):
        Schema.of(specs)


def test_field_given_by_mapping_and_by_keyword_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="'obs' stands twice"):
        Schema.of({"obs": "bool"}, obs="int8")


def test_cast_without_safe_source_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="no safe casts to int8"):
        Field("int8", cast=True)


@pytest.mark.parametrize(
    ("roles", "pairs", "words"),
    [
        ({"bonus": "obs"}, None, "role 'bonus' is not one of"),
        ({"reward": "r"}, None, "role 'reward' names the field 'r'"),
        (None, {"obs": "gone"}, "pair 'obs' -> 'gone'"),
        (None, {"obs": "reward"}, r"pair 'obs' is float32\[98\], 'reward' is float32"),
    ],
)
def test_wrong_role_or_pair_is_refused_by_name(roles: dict[str, str] | None, pairs: dict[str, str] | None, words: str) -> None:
    with pytest.raises(SchemaMismatch, match=words):
        Schema.of(obs=("float32", 98), reward="float32", roles=roles, pairs=pairs)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Schema.of(obs="float32"), "act is missing"),
        (Schema.of(obs="float32", act="int8", x="bool"), "x is extra"),
        (Schema.of(obs="float64", act="int8"), "obs is float64, not float32"),
        (Schema.of(obs=("float32", 1), act="int8"), r"obs is float32\[1\], not float32"),
        (Schema.of(act="int8", obs="float32"), "the order is act, obs, not obs, act"),
        (Schema.of(obs="float32", act="int8", roles={"reward": "obs"}), "roles and pairs"),
    ],
)
def test_differences_name_the_field_and_go_with_the_fingerprint(other: Schema, words: str) -> None:
    schema = Schema.of(obs="float32", act="int8")
    assert re.search(words, schema.differences(other))
    assert schema.fingerprint != other.fingerprint


def test_cast_changes_no_byte_and_no_fingerprint() -> None:
    assert Schema.of(r=Field("float32", cast=True)).fingerprint == Schema.of(r="float32").fingerprint


wire_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["fields", "float32", "obs"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["fields", "roles", "pairs", "x"]), inner, max_size=3),
    max_leaves=12,
)


@given(wire_values | st.fixed_dictionaries({"fields": st.lists(st.lists(wire_values, max_size=5), max_size=3)}))
def test_anything_on_the_wire_is_a_schema_or_a_schema_mismatch(wire: object) -> None:
    try:
        schema = Schema.from_wire(wire)
    except SchemaMismatch:
        return
    assert Schema.from_wire(schema.to_wire()) == schema


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        ([], "a schema is a map"),
        ({"fields": [], "extra": 1}, "a schema is a map"),
        ({"fields": {}}, "fields must be a list"),
        ({"fields": [["a", "bool", []]] * 257}, "at most 256"),
        ({"fields": [["a", "bool"]]}, r"must be \[name, dtype, shape\]"),
        ({"fields": [["a", "bool", [], 1]]}, r"must be \[name, dtype, shape\]"),
        ({"fields": [["a", "bool", []], ["a", "int8", []]]}, "'a' stands twice"),
        ({"fields": [["a", "bool", ["3"]]]}, "shape"),
        ({"fields": [["a", "bool", [2**63]]]}, "1 to 67,108,864"),
        ({"fields": [["a", "bool", []]], "roles": [1]}, "roles must map strings"),
        ({"fields": [["a", "bool", []]], "pairs": {"a": 1}}, "pairs must map strings"),
    ],
)
def test_wrong_wire_schema_is_refused_by_what_is_wrong(wire: object, words: str) -> None:
    with pytest.raises(SchemaMismatch, match=words):
        Schema.from_wire(wire)


def test_spaces_become_the_usual_transition() -> None:
    box = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    observation = gymnasium.spaces.Dict(
        {"camera": gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8), "joints": gymnasium.spaces.Tuple((box, box))}
    )
    schema = Schema.from_spaces(observation, gymnasium.spaces.Discrete(4))
    assert {field.name: field.describe() for field in schema} == {
        "obs.camera": "uint8[8, 8, 3]",
        "obs.joints.0": "float32[3]",
        "obs.joints.1": "float32[3]",
        "action": "int64",
        "reward": "float32",
        "next_obs.camera": "uint8[8, 8, 3]",
        "next_obs.joints.0": "float32[3]",
        "next_obs.joints.1": "float32[3]",
        "terminated": "bool",
        "truncated": "bool",
    }
    assert schema.pairs["obs.joints.1"] == "next_obs.joints.1"


def test_space_without_a_fixed_shape_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="no fixed dtype and shape"):
        Schema.from_spaces(gymnasium.spaces.Graph(gymnasium.spaces.Discrete(2), None), gymnasium.spaces.Discrete(2))
