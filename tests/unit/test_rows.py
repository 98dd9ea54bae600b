"""Rows are taken as they are or refused by name; nothing is cast in silence."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from replay_server_client.rows import RowReader
from replay_server_protocol.errors import RowsRejected
from replay_server_protocol.schema import Field, Schema

SCHEMA = Schema.of(obs=("float32", 3), reward=Field("float32", cast=True), step=Field("int32", cast=True), half="bfloat16", done="bool")


def rows(n: int = 4, **other: object) -> dict[str, object]:
    return {
        "obs": np.ones((n, 3), np.float32),
        "reward": np.zeros(n, np.float32),
        "step": np.arange(n, dtype=np.int32),
        "half": np.zeros(n, np.uint16),
        "done": np.zeros(n, np.bool_),
    } | other


def reader(lanes: int = 2) -> RowReader:
    return RowReader(SCHEMA, lanes)


def test_right_rows_are_not_copied() -> None:
    given = rows()
    block = reader().read(given)
    assert block.rows == 4
    assert all(array is given[name] for name, array in zip(SCHEMA.names, block.arrays, strict=True))


def test_nested_mappings_are_flattened_with_dots() -> None:
    nested = Schema.of({"camera": {"rgb": ("uint8", 2)}, "reward": "float32"})
    block = RowReader(nested, 1).read({"reward": np.zeros(1, np.float32), "camera": {"rgb": np.ones((1, 2), np.uint8)}})
    assert block.arrays[0].tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("change", "field", "remedy"),
    [
        ({"obs": np.ones((4, 3))}, "obs", "must be float32; convert it"),
        ({"obs": np.ones((4, 3), ">f4")}, "obs", "must be float32"),
        ({"obs": np.ones((4, 2), np.float32)}, "obs", r"must be \(4, 3\)"),
        ({"reward": np.zeros((4, 1), np.float32)}, "reward", r"must be \(4,\)"),
        ({"reward": np.zeros(6, np.float32)}, "reward", "6 rows, field 'obs' has 4"),
        ({"reward": [0.0] * 4}, "reward", "a list, must be an array"),
        ({"reward": np.zeros(4, np.float16)}, "reward", "must be float32"),
        ({"done": np.zeros(4, np.uint8)}, "done", "must be bool"),
        ({"half": np.zeros(4, np.float32)}, "half", "must be bfloat16"),
        ({"step": np.array([0, 0, 0, 2**31])}, "step", "don't fit int32"),
        ({"extra": np.zeros(4)}, "extra", "not in the schema"),
        ({"obs": np.float32(1)}, "obs", "single value"),
        ({"obs": {"deep": np.ones((4, 3), np.float32)}}, "obs", "a dict, must be an array"),
    ],
)
def test_wrong_rows_are_refused_by_field_with_what_would_be_right(change: dict[str, object], field: str, remedy: str) -> None:
    with pytest.raises(RowsRejected, match=remedy) as refused:
        reader().read(rows() | change)
    assert refused.value.details["field"] == field
    assert repr(field) in str(refused.value)


def test_missing_field_is_named() -> None:
    given = rows()
    del given["reward"]
    with pytest.raises(RowsRejected, match="'reward' is missing"):
        reader().read(given)


def test_rows_that_are_no_whole_steps_are_refused() -> None:
    with pytest.raises(RowsRejected, match=r"3 rows .* no whole steps of 2 lanes"):
        reader().read(rows(3))


def test_undeclared_cast_is_refused_and_the_refusal_says_how_to_declare_it() -> None:
    plain = Schema.of(reward="float32")
    with pytest.raises(RowsRejected, match=r"Field\('float32', \(\), cast=True\)"):
        RowReader(plain, 1).read({"reward": np.zeros(1)})


@pytest.mark.parametrize("given", [np.array([0.5, 1.5, 2.5, 3.5]), np.array([True, False, True, False])])
def test_declared_casts_to_float32_keep_the_values(given: np.ndarray[tuple[int], np.dtype[np.generic]]) -> None:
    reward = reader().read(rows(reward=given)).arrays[1]
    assert reward.dtype == np.float32
    assert reward.tolist() == given.tolist()


def test_float64_beyond_float32_becomes_inf_without_a_warning() -> None:
    assert np.isinf(reader().read(rows(reward=np.full(4, 1e300))).arrays[1]).all()


def test_range_of_int64_is_checked_on_kept_rows_only() -> None:
    step = np.array([2**31 - 1, -(2**31), 2**40, 7])
    block = reader().read(rows(step=step), mask=np.array([True, True, False, True]))
    assert block.arrays[2][[0, 1, 3]].tolist() == [2**31 - 1, -(2**31), 7]


def test_bfloat16_of_ml_dtypes_is_taken_as_its_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    half = np.array([1.0, 2.0, -1.0, 0.0], ml_dtypes.bfloat16)
    assert reader().read(rows(half=half)).arrays[3].tolist() == [0x3F80, 0x4000, 0xBF80, 0]
    with pytest.raises(RowsRejected, match="must be uint16"):
        RowReader(Schema.of(x="uint16"), 1).read({"x": half})


def test_cpu_tensors_are_taken_without_a_copy() -> None:
    import torch

    obs, half = torch.ones((4, 3), requires_grad=True), torch.tensor([1.0, 2.0, -1.0, 0.0], dtype=torch.bfloat16)
    block = reader().read(rows(obs=obs, half=half))
    assert block.arrays[0].ctypes.data == obs.data_ptr()
    assert block.arrays[3].tolist() == [0x3F80, 0x4000, 0xBF80, 0]


def test_device_tensors_are_refused_with_the_remedy() -> None:
    import torch

    with pytest.raises(RowsRejected, match=r"'obs': a tensor on meta; .*tensor\.cpu\(\)"):
        reader().read(rows(obs=torch.ones((4, 3), device="meta")))


def test_masks_must_be_bool_and_one_value_a_row() -> None:
    for wrong in (np.ones(4, np.int64), np.ones(3, np.bool_), [True] * 4):
        with pytest.raises(RowsRejected, match=r"^mask: .*bool\[4\]"):
            reader().read(rows(), mask=wrong)
        with pytest.raises(RowsRejected, match=r"^final_mask: .*bool\[4\]"):
            reader().read(rows(), final_mask=wrong, final={})


def test_kept_rows_are_counted_by_step() -> None:
    block = reader().read(rows(), mask=np.array([True, False, False, False]))
    assert block.kept_before is not None
    assert block.kept_before.tolist() == [0, 1, 1]


def test_final_has_the_full_leading_dimension_and_known_fields() -> None:
    ends = np.array([True, False, False, False])
    with pytest.raises(RowsRejected, match="full leading dimension"):
        reader().read(rows(), final_mask=ends, final={"obs": np.ones((1, 3), np.float32)})
    with pytest.raises(RowsRejected, match="not in the schema"):
        reader().read(rows(), final_mask=ends, final={"other": np.ones(4)})
    with pytest.raises(RowsRejected, match="go together"):
        reader().read(rows(), final_mask=ends)


def test_collector_is_imported_without_torch() -> None:
    code = "import sys, replay_server_client as c; c.Collector, c.Schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
