"""Collectors against the real daemon on the CPU ring: commit, backpressure, and every way a server can go away."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from replay_server_client import Collector, InvalidRequest, ReplayTimeout, Schema, SchemaMismatch, ServerClosing, ServerGone
from replay_server_client import collector as collector_module
from replay_server_client.status import query
from support.freeze import frozen
from support.processes import Children
from support.reports import wait_report
from support.servers import ServerProcess, spawn_server

SCHEMA = Schema.of(reward="float32", obs=("float32", 3))
SLACK_S = 0.1
"""What a busy machine may add to a wait."""


def rows(n: int) -> dict[str, object]:
    return {"reward": np.arange(n, dtype=np.float32), "obs": np.zeros((n, 3), np.float32)}


def attach(server: ServerProcess, **options: object) -> Collector:
    wanted: dict[str, object] = {"lanes": 2, "timeout": 10.0} | options
    return Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, **wanted)  # type: ignore[arg-type]


def counters(server: ServerProcess) -> dict[str, int]:
    report = query(server.endpoints, 5.0)["counters"]
    assert isinstance(report, dict)
    return report


def test_flushed_rows_are_committed_and_counted(server: ServerProcess) -> None:
    with attach(server) as first, attach(server, name="second", lanes=1) as second:
        first.write(rows(100), mask=np.arange(100) % 10 != 0)
        assert first.flush() == 90
        second.write(rows(7) | {"reward": np.array([0, 1, np.nan, 3, 4, 5, 6], np.float32)})
        assert second.flush() == 96
        assert first.flush() == 90
        assert counters(server)["rows_committed"] == 96
        assert counters(server)["rows_masked"] == 10
        assert counters(server)["rows_rejected"] == 1


def test_ring_wraps_many_times_under_one_collector(server: ServerProcess) -> None:
    with attach(server) as collector:
        for _ in range(100):
            collector.write(rows(98))
        assert collector.flush() == 9800
        assert collector.statistics().rows_committed == 9800


def test_rows_that_a_close_gave_up_are_counted_once_and_by_the_server_that_commits_them(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "_CLOSE_WAIT_S", 0.1)
    collector = attach(server)
    collector.write(rows(10))
    collector.flush()
    with frozen(server.child):
        collector.write(rows(6))
        with pytest.raises(ReplayTimeout, match=r"6 published, without a credit for 0\.\d s.*does not answer, its process is stopped"):
            collector.close()
    told = wait_report(server, lambda found: not found["collectors"] and not found["counters"]["rows_in_flight"])["counters"]
    assert (told["rows_published"], told["rows_committed"], told["rows_lost"]) == (16, 16, 0)
    found = collector.statistics()
    assert (found.rows_written, found.rows_committed, found.rows_in_flight, found.rows_lost) == (16, 10, 6, 0)


def test_second_collector_of_another_schema_is_refused_by_field(server: ServerProcess) -> None:
    with attach(server), pytest.raises(SchemaMismatch, match="obs"):
        Collector.connect(server.name, schema=Schema.of(reward="float32", obs=("float32", 4)), run_dir=server.run_dir, timeout=10.0)


def test_limited_server_makes_a_write_wait_and_says_why(
    start_server: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "_CLOSE_WAIT_S", 0.05)
    server = start_server("--capacity", "1000", "--slot-rows", "16", "--samples-per-insert", "1", "--tolerance", "64")
    collector = attach(server)
    before = time.monotonic()
    with pytest.raises(ReplayTimeout, match="samples per insert 1") as late:
        collector.write(rows(400), timeout=0.3)
    assert 0.3 <= time.monotonic() - before < 0.33 + SLACK_S
    assert 0 < late.value.rows_written < 400
    assert late.value.rows_written % 2 == 0
    assert collector.statistics().rows_written == late.value.rows_written
    with pytest.raises(ReplayTimeout, match="not committed"):
        collector.close()
    with pytest.raises(InvalidRequest, match="is closed"):
        collector.flush()


def test_stopped_server_raises_in_time_and_goes_on_later(server: ServerProcess) -> None:
    with attach(server) as collector:
        server.child.send_signal(signal.SIGSTOP)
        try:
            before = time.monotonic()
            with pytest.raises(ReplayTimeout, match="does not answer"):
                collector.write(rows(100), timeout=0.2)
            assert time.monotonic() - before < 0.22 + SLACK_S
        finally:
            server.child.send_signal(signal.SIGCONT)
        collector.write(rows(2))
        collector.flush()
        statistics = collector.statistics()
        assert statistics.rows_committed == statistics.rows_written


def test_closing_server_is_told_to_a_waiting_flush(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "16", "--samples-per-insert", "1", "--tolerance", "16")
    collector = attach(server)
    collector.write(rows(48))
    threading.Timer(0.1, server.child.send_signal, (signal.SIGTERM,)).start()
    before = time.monotonic()
    with pytest.raises(ServerClosing, match="32 rows"):
        collector.flush(timeout=10.0)
    assert time.monotonic() - before < 3.0
    with pytest.raises(ServerGone):
        collector.write(rows(2), timeout=0.0)
    collector.close()
    assert server.child.wait() == 0


def test_killed_server_ends_a_wait_at_once_and_its_successor_is_used(crash_dir: Path, children: Children) -> None:
    options = ("--capacity", "1000", "--slot-rows", "16", "--samples-per-insert", "1", "--tolerance", "16")
    server = spawn_server(children, crash_dir, *options)
    collector = attach(server)
    killing = threading.Timer(0.1, server.kill)
    killing.start()
    before = time.monotonic()
    with pytest.raises(ServerGone, match="rows that it had not committed") as gone:
        while True:
            collector.write(rows(16))
            collector.flush(timeout=10.0)
    assert time.monotonic() - before < 2.0
    killing.join()
    with pytest.raises(ServerGone, match="no server called"):
        collector.write(rows(2), timeout=0.05)
    successor = spawn_server(children, crash_dir, "--capacity", "1000", "--slot-rows", "16", name=server.name)
    collector.write(rows(32))
    assert collector.flush() == 32
    assert counters(successor)["rows_lost"] == gone.value.details["rows_lost"]
    collector.close()
    successor.stop()


def test_write_that_waits_outlives_a_killed_server(crash_dir: Path, children: Children) -> None:
    server = spawn_server(children, crash_dir, "--capacity", "1000", "--slot-rows", "16", "--samples-per-insert", "1", "--tolerance", "16")

    def replace() -> None:
        server.kill()
        replaced.append(spawn_server(children, crash_dir, "--capacity", "1000", "--slot-rows", "16", name=server.name))

    replaced: list[ServerProcess] = []
    collector = attach(server)
    replacing = threading.Timer(0.1, replace)
    replacing.start()
    collector.write(rows(200), timeout=30.0)
    replacing.join()
    with pytest.raises(ServerGone):
        collector.flush()
    collector.flush()
    statistics = collector.statistics()
    assert statistics.rows_written == 200 == statistics.rows_committed + statistics.rows_lost
    assert statistics.rows_lost > 0
    collector.close()
    replaced[0].stop()


def test_dead_collectors_published_rows_are_committed_and_its_open_ones_are_not(server: ServerProcess, children: Children) -> None:
    with attach(server, name="witness") as witness:
        program = f"""
import numpy as np, os
from replay_server_client import Collector, Schema
schema = Schema.of(reward="float32", obs=("float32", 3))
collector = Collector.connect({server.name!r}, schema=schema, lanes=2, run_dir={str(server.run_dir)!r}, linger=60.0)
for n in (32, 6):
    collector.write({{"reward": np.zeros(n, np.float32), "obs": np.zeros((n, 3), np.float32)}})
os.kill(os.getpid(), 9)
"""
        children.start([sys.executable, "-c", program], name="dying collector").wait()
        witness.write(rows(2))
        assert witness.flush() == 34
        assert counters(server)["rows_committed"] == 34


def test_closing_while_idle_is_noticed_by_the_next_call(server: ServerProcess) -> None:
    collector = attach(server)
    collector.write(rows(2))
    collector.flush()
    assert server.stop() == 0
    with pytest.raises((ServerClosing, ServerGone)):
        collector.flush(timeout=0.1)
    collector.close()
