"""A learner dies by kill -9 while it holds a lease: the lease ends with it, ingest goes on, no row is lost."""

from __future__ import annotations

import time
from collections.abc import Callable

from replay_server_client import Collector
from support.markers import MARKERS, marker_steps
from support.processes import Children
from support.raw_client import RawLearner
from support.reports import assert_conserved, report_of, wait_report
from support.servers import ServerProcess

HOLDER = """
    import sys, threading
    from pathlib import Path
    from replay_server_protocol.endpoints import Endpoints
    from support.raw_client import RawLearner

    name, run_dir = sys.argv[1:]
    learner = RawLearner(Endpoints.resolve(name, Path(run_dir)), name="doomed")
    grant = learner.grant(1, 8)
    learner.ask(2, 8, min_committed=10**9)
    print("holds a lease", flush=True)
    threading.Event().wait()
"""


def test_the_lease_of_a_dead_learner_does_not_block_ingest(start_server: Callable[..., ServerProcess], children: Children) -> None:
    server = start_server("--capacity", "64", "--slot-rows", "16", "--headroom", "16", "--lease", "600")
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector:
        collector.write(marker_steps(0, 1, 0, 64))
        collector.flush()
        child = children.script(HOLDER, server.name, str(server.run_dir))
        child.wait_for("holds a lease")
        assert wait_report(server, lambda found: found["learners"])["learners"][0]["open_leases"] == 1
        collector.write(marker_steps(0, 1, 64, 48))
        wait_report(server, lambda found: found["flow"]["blocked_side"] == "both")
        child.kill()
        died_s = time.monotonic()
        assert collector.flush(5) == 112
        assert time.monotonic() - died_s < 2, "a death is seen at once, not at the lease's end in ten minutes"
        report = wait_report(server, lambda found: not found["learners"])
        assert_conserved(report)
        counters = report["counters"]
        assert (counters["batches_dropped"], counters["leases_revoked"], counters["sessions_lost"]) == (1, 0, 1)
        assert report["flow"]["sampled_rows"] == 0, "what it never used is refunded"
        with RawLearner(server.endpoints) as other:
            assert other.window(1, "step")[1].tolist() == list(range(48, 112))


def test_status_answers_in_time_and_leases_come_back_while_learners_are_killed_again_and_again(
    start_server: Callable[..., ServerProcess], children: Children
) -> None:
    server = start_server("--capacity", "64", "--slot-rows", "16", "--headroom", "16", "--lease", "600")
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector:
        collector.write(marker_steps(0, 1, 0, 64))
        collector.flush()
        for kill in range(1, 6):
            child = children.script(HOLDER, server.name, str(server.run_dir))
            child.wait_for("holds a lease")
            child.kill()
            wait_report(server, lambda found: not found["learners"], within_s=2)
            slowest_s = 0.0
            for _ in range(20):
                before_s = time.monotonic()
                report = report_of(server)
                slowest_s = max(slowest_s, time.monotonic() - before_s)
            assert slowest_s < 0.5
            assert report["counters"]["sessions_lost"] == kill
            collector.write(marker_steps(0, 1, 64 * kill, 64))
            collector.flush(5)  # twice round: a lease left open would hold it up
        assert_conserved(report_of(server))
