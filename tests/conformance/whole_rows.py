"""What every ring promises a learner whatever else goes on: rows that are whole and of the window. Subclass, give it a ``load`` fixture.

The test's own process writes as fast as credits come; two learners in processes of their own check every row they sample.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from replay_server_client import Collector
from support.processes import Child, Children
from support.reports import assert_conserved, report_of, wait_report
from support.self_verifying import TIMEOUT_S, Sampled, sample_until_closed, schema_of, write_for, write_until
from support.servers import ServerProcess

CAPACITY, HEADROOM, SLOT_ROWS = 8192, 4096, 512
RING_ROWS = CAPACITY + HEADROOM
LEASE_S = 0.1
STOPS = 10
DELAY_S = 0.2
BATCHES_AHEAD = 2
"""Of a learner: one lent, one prefetched. Those after them see what is committed by now."""


@dataclass(frozen=True)
class Load:
    """Where, how wide and how much: ``least_rows`` are sampled in each test, ``wraps`` of the ring written in the first."""

    server: tuple[str, ...]
    device: str
    width: int
    batch_rows: int
    least_rows: int
    wraps: int


class Run:
    """A server, the test's collector with one slot written, and two learners that sample."""

    def __init__(self, load: Load, server: ServerProcess, collector: Collector, learners: list[Child], first_seq: int) -> None:
        self.server = server
        self.learners = learners
        self._load = load
        self._collector = collector
        self._seq = first_seq

    def write_rows(self, rows: int) -> None:
        end_seq = self._seq + rows
        self._seq = write_until(self._collector, self._load.width, self._seq, lambda seq: seq >= end_seq)

    def write_for(self, seconds: float) -> None:
        self._seq = write_for(self._collector, self._load.width, self._seq, seconds)

    def finish(self) -> list[Sampled]:
        """Once enough was sampled, also of the newest rows, the server stops, and the learners tell what they found; whatever the test, no
        row may be wrong."""
        assert self._collector.flush(TIMEOUT_S) == self._seq
        last = {each["name"]: each["rows"] + BATCHES_AHEAD * self._load.batch_rows for each in report_of(self.server)["learners"]}

        def has_enough(found: dict[str, Any]) -> bool:
            rows = {each["name"]: each["rows"] for each in found["learners"]}
            return sum(rows.values()) >= self._load.least_rows and all(rows[name] > least for name, least in last.items())

        report = wait_report(self.server, has_enough, within_s=60)
        assert_conserved(report)
        self._collector.close()
        assert self.server.stop() == 0
        found: list[Sampled] = [learner.result() for learner in self.learners]
        for each in found:
            assert (each["torn"], each["stale"]) == (0, 0), found
            assert each["newest"] == self._seq
            assert each["rows"] > 0
        return found


class WholeRowsPromises:
    @contextmanager
    def run(
        self, load: Load, start_server: Callable[..., ServerProcess], children: Children, *options: str, slot_rows: int = SLOT_ROWS
    ) -> Iterator[Run]:
        sizes = ("--capacity", str(CAPACITY), "--headroom", str(HEADROOM), "--slot-rows", str(slot_rows), "--lease", str(LEASE_S))
        server = start_server(*load.server, *sizes, *options)
        with Collector.connect(server.name, schema=schema_of(load.width), run_dir=server.run_dir, timeout=TIMEOUT_S) as collector:
            first_seq = write_until(collector, load.width, 0, lambda seq: seq > 0)
            where = (server.name, str(server.run_dir), load.device)
            learners = [children.run(sample_until_closed, *where, load.width, load.batch_rows, prefetch) for prefetch in (0, 1)]
            for learner in learners:
                learner.wait_for("sampling")
            yield Run(load, server, collector, learners, first_seq)

    def test_no_row_is_torn_or_stale_while_ingest_runs_at_full_rate(
        self, load: Load, start_server: Callable[..., ServerProcess], children: Children
    ) -> None:
        with self.run(load, start_server, children) as run:
            run.write_rows(load.wraps * RING_ROWS)
            run.finish()

    def test_no_row_is_torn_or_stale_while_every_copy_takes_200_ms(
        self, load: Load, start_server: Callable[..., ServerProcess], children: Children
    ) -> None:
        """Half of a span lies in the ring for 200 ms before the rest follows: who doesn't wait for the commit sees torn rows."""
        slot_rows = 2048
        delay = ("--debug-copy-delay", str(DELAY_S), "--depth", "2")
        with self.run(load, start_server, children, *delay, slot_rows=slot_rows) as run:
            run.write_rows(3 * RING_ROWS)
            run.finish()

    def test_no_row_is_torn_or_stale_when_a_learner_is_stopped_and_continued(
        self, load: Load, start_server: Callable[..., ServerProcess], children: Children
    ) -> None:
        """Each stop outlasts the lease, so the ring moves on under whatever gather the learner still has to make."""
        with self.run(load, start_server, children) as run:
            victims = run.learners * (STOPS // 2)
            for victim in victims:
                victim.send_signal(signal.SIGSTOP)
                try:
                    run.write_for(3 * LEASE_S)
                finally:
                    victim.send_signal(signal.SIGCONT)
                run.write_for(LEASE_S)
            report = report_of(run.server)
            assert report["counters"]["leases_revoked"] > 0, "no stop met an open lease: this test proved nothing"
            run.finish()
