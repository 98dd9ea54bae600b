"""Status reports in tests: one now, or the first one that a condition holds for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from replay_server_client.status import query
from support.servers import ServerProcess

_WITHIN_S = 10.0
_ASK_AGAIN_S = 0.01


def report_of(server: ServerProcess, timeout_s: float = 5.0) -> dict[str, Any]:
    return query(server.endpoints, timeout_s)


def wait_report(server: ServerProcess, holds: Callable[[dict[str, Any]], object], within_s: float = _WITHIN_S) -> dict[str, Any]:
    """The first report for which ``holds``; AssertionError with the last one if there is none in time.

    Asks again and again: another process's state is no event here.
    """
    end = time.monotonic() + within_s
    while not holds(report := report_of(server)):
        assert time.monotonic() < end, f"never reported within {within_s} s; the last report: {report}"
        time.sleep(_ASK_AGAIN_S)
    return report


def assert_conserved(report: dict[str, Any]) -> None:
    """Every published row is committed, rejected, lost or in flight: in sum, and for each collector without the lost ones."""
    counters = report["counters"]
    accounted = sum(counters[f"rows_{name}"] for name in ("committed", "rejected", "lost", "in_flight"))
    assert counters["rows_published"] == accounted, counters
    if report["ring"] is not None:
        assert counters["rows_committed"] == report["ring"]["committed"]
        assert counters["rows_overwritten"] == report["ring"]["tail"]
    if counters["rows_in_flight"] == 0:
        for collector in report["collectors"]:
            assert collector["published_rows"] == collector["committed_rows"] + collector["rejected_rows"], collector
