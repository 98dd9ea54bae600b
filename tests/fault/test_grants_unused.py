"""Learners that ask and use nothing: what they hold comes back by their going or by the lease's end, and nobody else starves."""

from __future__ import annotations

import time
from collections.abc import Callable

from replay_server_client import Collector
from support.markers import MARKERS, marker_steps
from support.raw_client import RawLearner
from support.reports import assert_conserved, wait_report
from support.servers import ServerProcess

LEASE_S = 0.3
ASKED = 500  # more at once would not fit the queue of a server that gets no turn


def test_grants_that_nobody_reads_and_one_that_nobody_releases_starve_nobody(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--capacity", "64", "--slot-rows", "16", "--headroom", "16", "--lease", str(LEASE_S))
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector:
        collector.write(marker_steps(0, 1, 0, 64))
        collector.flush()
        with RawLearner(server.endpoints, name="greedy") as greedy:
            for number in range(1, ASKED + 1):
                greedy.ask(number)
            wait_report(server, lambda found: found["learners"][0]["open_leases"] > 1)
            with RawLearner(server.endpoints, name="modest") as modest:
                for number in range(1, 20):
                    before_s = time.monotonic()
                    modest.release(modest.grant(number))
                    assert time.monotonic() - before_s < 1.0
        with RawLearner(server.endpoints, name="holder") as holder:
            kept = holder.grant(1)
            before_s = time.monotonic()
            collector.write(marker_steps(0, 1, 64, 400), timeout=10)
            assert collector.flush(10) == 464
            assert time.monotonic() - before_s < LEASE_S + 2.0, "the ring waits for a lease's end and no longer"
            holder.release(kept)
        report = wait_report(server, lambda found: not found["learners"] and found["counters"]["leases_revoked"] > 0)
        assert_conserved(report)
        assert report["counters"]["stale_messages"] >= 1, "a release after the lease's end is told from one in time"
