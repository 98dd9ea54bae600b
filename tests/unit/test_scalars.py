"""Flat, stable, numbers only."""

from __future__ import annotations

from typing import Any

from replay_server_client.scalars import scalars

CLIENT = {"name": "c", "published_rows": 3, "committed_rows": 2, "rejected_rows": 1, "masked_rows": 0, "nonfinite_rows": 0, "credits": 2}
REPORT: dict[str, Any] = {
    "uptime_s": 1.5,
    "ring": {"size_rows": 25, "capacity_rows": 100, "committed": 25, "tail": 0, "device_bytes": 0, "host_bytes": 4096},
    "ingress": {"segments": 2, "host_bytes": 64, "occupied_slots": 0, "waiting_slots": 0},
    "collectors": [{**CLIENT, "waiting_s": 0.5}, {**CLIENT, "waiting_s": 0.25}],
    "learners": [],
    "flow": {"state": "running", "reason": None, "samples_per_insert": 2.0},
    "rates": {"rows_per_s": 10.0},
    "latency": {"commit_us": {"p50": 3.0, "p99": None}},
    "moments": {"reward": {"count": 2, "mean": 1.0}, "obs": {"count": 2, "mean": [1.0, None, 3.0]}},
    "episodes": None,
    "staleness": {"buckets": [{"le": 0, "rows": 3}, {"le": None, "rows": 1}], "mean": 0.5, "max": 2},
    "mailboxes": {"host_bytes": 8, "versions": {"policy": 4}},
    "counters": {"rows_committed": 25},
}


def test_a_report_becomes_one_flat_dict_of_numbers_and_what_is_unknown_is_left_out() -> None:
    flat = scalars(REPORT, name="ring")
    assert all(type(value) is float for value in flat.values())
    wanted = {
        "ring/ring/fill": 0.25,
        "ring/collectors/count": 2,
        "ring/collectors/waiting_s": 0.75,
        "ring/learners/batches": 0,
        "ring/flow/samples_per_insert": 2,
        "ring/rates/rows_per_s": 10,
        "ring/latency/commit_us/p50": 3,
        "ring/moments/reward/mean": 1,
        "ring/moments/obs/mean/2": 3,
        "ring/staleness/rows_le_0": 3,
        "ring/staleness/rows_more": 1,
        "ring/staleness/max": 2,
        "ring/mailboxes/policy": 4,
        "ring/counters/rows_committed": 25,
    }
    assert wanted.items() <= flat.items()
    for left_out in ("flow/state", "flow/reason", "latency/commit_us/p99", "moments/obs/mean/1", "episodes"):
        assert not any(key.startswith(f"ring/{left_out}") for key in flat)


def test_before_there_is_a_ring_there_are_numbers_too() -> None:
    flat = scalars({**REPORT, "ring": None, "moments": {}, "staleness": None})
    assert flat["replay/uptime_s"] == 1.5
    assert not any(key.startswith("replay/ring/") for key in flat)
