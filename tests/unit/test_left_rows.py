"""Rows that a collector leaves uncommitted are counted and told once: by the error of its close, or in the log where none is raised."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from replay_server_client import Collector, CollectorStatistics, ReplayTimeout, Schema, ServerGone
from replay_server_client.slots import LentSlots
from support.fake_server import FakeServer
from support.leaks import nothing_left

SCHEMA = Schema.of(reward="float32")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CLOSE_WAIT_S", "_NEXT_SERVER_WAIT_S"):
        monkeypatch.setattr(f"replay_server_client.collector.{name}", 0.05)


@pytest.fixture
def server(run_dir: Path) -> Iterator[FakeServer]:
    with nothing_left(), FakeServer(run_dir, holds_credits=True) as fake:
        yield fake


def connect(server: FakeServer) -> Collector:
    return Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, name="walker", timeout=5.0, linger=60.0)


def rows(n: int) -> dict[str, object]:
    return {"reward": np.arange(n, dtype=np.float32)}


def counts(found: CollectorStatistics) -> tuple[int, int, int, int]:
    return found.rows_written, found.rows_committed, found.rows_in_flight, found.rows_lost


def long_ago(slots: LentSlots) -> None:
    """What has happened so far was 100 s ago."""
    slots._publishes = slots._publishes._replace(quiet_since_s=slots._publishes.quiet_since_s - 100.0)


def test_a_close_that_has_waited_in_vain_tells_how_many_rows_the_server_may_commit_yet(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    collector = connect(server)
    collector.write(rows(24))
    with pytest.raises(ReplayTimeout) as late:
        collector.close()
    assert str(late.value).startswith(
        "collector walker is closed with rows not committed: 24 published, without a credit for 0.1 s: the server may commit them yet; "
        "published rows are not committed after 0.0"
    )
    assert "to wait longer, call flush(timeout=...) before close()" in str(late.value)
    assert (late.value.details["rows_in_flight"], late.value.details["rows_lost"]) == (24, 0)
    assert counts(collector.statistics()) == (24, 0, 24, 0)
    assert server.rows("reward").tolist() == list(range(24)), "they have reached it, so it counts them"
    collector.close()
    assert caplog.messages == [], "told once, by the error"


def test_the_end_of_a_block_that_raised_tells_the_log_instead(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError), connect(server) as collector:
        collector.write(rows(24))
        raise KeyError
    (line,) = caplog.messages
    assert line.startswith("closing collector walker: collector walker is closed with rows not committed: 24 published")
    assert counts(collector.statistics()) == (24, 0, 24, 0)


def test_a_close_whose_credits_come_tells_nothing(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.holds_credits = False
    collector = connect(server)
    collector.write(rows(24))
    collector.close()
    assert counts(collector.statistics()) == (24, 24, 0, 0)
    assert caplog.messages == []


def test_the_time_without_a_credit_begins_with_the_publish_and_with_the_last_credit(server: FakeServer) -> None:
    collector = connect(server)
    slots = collector._ingress.slots
    assert slots is not None
    long_ago(slots)
    assert slots.uncredited_for_s == 0.0
    collector.write(rows(16))
    assert slots.uncredited_for_s < 50.0, "nothing was owed before this"
    long_ago(slots)
    slots.repeat()
    assert slots.uncredited_for_s > 100.0, "a repeat is no credit"
    assert collector.statistics().repeats == 1
    slots.repeat()
    assert collector.statistics().repeats == 1, "one a second"
    collector.write(rows(16))
    server.credit(1)
    collector._ingress.connection.sleep(5.0)
    collector._ingress.absorb()
    assert 0.0 < slots.uncredited_for_s < 50.0
    server.hold_no_more()
    collector.close()


def test_a_close_in_the_block_of_a_slot_waits_for_nothing_and_tells_what_it_left(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    collector = connect(server)
    collector.write(rows(16))
    with pytest.raises(RuntimeError), collector.slot():
        collector.close()
        raise RuntimeError
    (line,) = caplog.messages
    assert line.startswith("collector walker ends with rows not committed: 16 published, without a credit for 0.")
    assert line.endswith("close it after the block of slot()")
    assert counts(collector.statistics()) == (16, 0, 16, 0)


def test_a_close_in_the_block_of_a_slot_that_finds_the_server_lost_counts_its_rows_as_lost(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    collector = connect(server)
    collector.write(rows(16))
    with pytest.raises(RuntimeError), collector.slot():
        server.restart()
        collector._ingress.connection.sleep(5.0)
        collector.close()
        raise RuntimeError
    assert "16 lost with an earlier server" in caplog.text
    assert counts(collector.statistics()) == (16, 0, 0, 16)


def test_a_loss_that_no_call_has_told_of_is_told_by_close(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    collector = connect(server)
    collector.write(rows(24))
    server.restart()
    collector._ingress.connection.sleep(5.0)
    with pytest.raises(ServerGone) as gone:
        collector.write(rows(32), timeout=0.0)
    assert gone.value.details == {"rows_written": 8}
    collector.close()
    (line,) = caplog.messages
    assert line.startswith("collector walker ends with rows not committed: 32 lost with an earlier server; flush() before close() tells")
    assert counts(collector.statistics())[3] == 32


def test_rows_kept_for_a_server_that_never_lends_slots_are_lost(server: FakeServer) -> None:
    server.resumes = True
    collector = connect(server)
    collector.write(rows(24))
    server.lends = False
    server.restart()
    with pytest.raises(ReplayTimeout, match="24 never published: lost; no slots were lent") as late:
        collector.close()
    assert late.value.details["rows_lost"] == 24
    assert counts(collector.statistics()) == (24, 0, 0, 24)


def test_a_collector_that_is_dropped_with_an_open_slot_tells_what_was_in_it(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    collector = connect(server)
    collector.write(rows(24))
    del collector
    gc.collect()
    (line,) = caplog.messages
    assert "16 published" in line
    assert "8 never published: lost; it was never closed: use it in a with block" in line
    assert caplog.records[0].levelno == logging.WARNING


def test_a_collector_that_is_dropped_with_its_rows_published_tells_nothing(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    collector = connect(server)
    collector.write(rows(16))
    del collector
    gc.collect()
    assert caplog.messages == []


def test_ctrl_c_in_a_close_tells_what_it_left(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collector = connect(server)
    collector.write(rows(24))

    def interrupted(timeout: float) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(collector, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collector.close()
    assert "16 published" in caplog.text
    assert "8 never published: lost" in caplog.text
    assert counts(collector.statistics()) == (24, 0, 16, 8)
