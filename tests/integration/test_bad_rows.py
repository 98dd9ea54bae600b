"""Rows that don't fit the schema are refused by the field's name, and nothing of them is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from replay_server_client import Collector, RowsRejected, Schema
from support.reports import report_of
from support.servers import ServerProcess

SCHEMA = Schema.of(obs=("float32", 3), action="int32", done="bool")
N = 4


def good() -> dict[str, Any]:
    return {"obs": np.zeros((N, 3), np.float32), "action": np.zeros(N, np.int32), "done": np.zeros(N, np.bool_)}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"action": None}, "action"),
    "extra": ({"colour": np.zeros(N, np.int32)}, "colour"),
    "misnamed": ({"obs": None, "observation": np.zeros((N, 3), np.float32)}, "obs"),
    "wrong dtype": ({"obs": np.zeros((N, 3), np.float64)}, "obs"),
    "wrong integer": ({"action": np.zeros(N, np.int64)}, "action"),
    "integer for a bool": ({"done": np.zeros(N, np.uint8)}, "done"),
    "other byte order": ({"obs": np.zeros((N, 3), ">f4")}, "obs"),
    "wrong shape": ({"obs": np.zeros((N, 4), np.float32)}, "obs"),
    "flat": ({"obs": np.zeros(3 * N, np.float32)}, "obs"),
    "too few rows": ({"done": np.zeros(N - 2, np.bool_)}, "done"),
    "no array": ({"action": "left"}, "action"),
    "objects": ({"action": np.array([None] * N)}, "action"),
}


@pytest.fixture
def collector(server: ServerProcess) -> Any:
    with Collector.connect(server.name, schema=SCHEMA, lanes=2, run_dir=server.run_dir) as connected:
        yield connected


def test_every_kind_of_bad_row_names_its_field_and_changes_nothing(server: ServerProcess, collector: Collector) -> None:
    for kind, (changes, field) in BAD.items():
        rows = {name: value for name, value in {**good(), **changes}.items() if value is not None}
        with pytest.raises(RowsRejected, match=field) as refused:
            collector.write(rows)
        assert refused.value.details.get("field") in (None, field, *changes), kind
    bad_calls: dict[str, dict[str, Any]] = {
        "half a step": {"rows": {name: value[:3] for name, value in good().items()}},
        "mask of another length": {"rows": good(), "mask": np.ones(N + 1, np.bool_)},
        "mask of numbers": {"rows": good(), "mask": np.ones(N, np.int64)},
        "final without mask": {"rows": good(), "final": {"obs": np.zeros((N, 3), np.float32)}},
        "final of an unknown field": {"rows": good(), "final_mask": np.ones(N, np.bool_), "final": {"colour": np.zeros(N)}},
    }
    for kind, arguments in bad_calls.items():
        with pytest.raises(RowsRejected):
            collector.write(**arguments)
        assert collector.statistics().rows_written == 0, kind
    assert report_of(server)["counters"]["rows_published"] == 0
    collector.write(good())
    assert collector.flush() == N


def test_rows_in_place_are_whole_steps_and_their_number_is_said(collector: Collector) -> None:
    for rows in (1, 3, -2, 17, 18):
        with pytest.raises(RowsRejected, match=str(rows)), collector.slot() as slot:
            slot.rows = rows
    with pytest.raises(RowsRejected, match=r"slot\.rows"), collector.slot() as slot:
        slot["action"][:2] = 1
    with pytest.raises(ZeroDivisionError), collector.slot() as slot:
        slot.rows = 2
        raise ZeroDivisionError
    assert collector.flush() == 0
    with collector.slot() as slot:
        for name, values in good().items():
            slot[name][:N] = values
        slot.rows = N
    assert collector.flush() == N
