"""A collector dies by kill -9: what it published is committed, what it only wrote never is, and the server serves on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from support.freeze import frozen
from support.markers import MARKERS
from support.processes import Child, Children
from support.raw_client import RawCollector, RawLearner
from support.reports import assert_conserved, report_of, wait_report
from support.servers import ServerProcess

DOOMED = """
    import signal, sys, threading

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # before imports start threads
    from replay_server_client import Collector
    from support.markers import MARKERS, marker_steps

    name, run_dir, steps = sys.argv[1:]
    collector = Collector.connect(name, schema=MARKERS, run_dir=run_dir, name="doomed", linger=1000.0)
    print("attached", flush=True)
    signal.sigwait([signal.SIGUSR1])
    collector.write(marker_steps(7, 1, 0, int(steps)))
    threading.Event().wait(0.1)  # its I/O thread hands the publishes to the kernel
    print("written", flush=True)
    threading.Event().wait()
"""


def start_doomed(children: Children, server: ServerProcess, steps: int) -> Child:
    """A collector that waits for SIGUSR1, then writes; whole slots are published, the rest stays open."""
    child = children.script(DOOMED, server.name, str(server.run_dir), str(steps))
    child.wait_for("attached")
    return child


def write(child: Child) -> None:
    child.send_signal(signal.SIGUSR1)
    child.wait_for("written")


def has_no_collector(report: dict[str, Any]) -> bool:
    return not report["collectors"]


def test_rows_written_and_not_published_never_reach_the_ring(server: ServerProcess, children: Children) -> None:
    child = start_doomed(children, server, steps=5)
    write(child)
    child.kill()
    report = wait_report(server, has_no_collector, within_s=2)
    assert (report["counters"]["rows_published"], report["counters"]["sessions_lost"]) == (0, 1)
    assert (report["ingress"]["segments"], report["ingress"]["host_bytes"]) == (0, 0)
    with RawCollector(server.endpoints, MARKERS) as other:
        other.publish(1, 0, 16)
        assert other.wait_credit(1).committed == 16


def test_published_slots_that_wait_for_room_are_committed_after_the_death(
    start_server: Callable[..., ServerProcess], children: Children
) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "16", "--lease", "600")
    with RawCollector(server.endpoints, MARKERS) as other, RawLearner(server.endpoints) as learner:
        ring_rows, number = learner.at.ring_rows, 0
        while number < ring_rows // 16:  # the ring is full
            number += 1
            other.publish(number, number % 2, 16)
            other.wait_credit(number)
            if number == 1:
                grant = learner.grant(1)  # of a window that begins with row 0
        child = start_doomed(children, server, steps=32)
        write(child)
        wait_report(server, lambda found: found["ingress"]["waiting_slots"] == 2)
        child.kill()
        report = wait_report(server, lambda found: len(found["collectors"]) == 1, within_s=2)
        committed = 16 * number + 32
        learner.release(grant)
        report = wait_report(server, lambda found: found["counters"]["rows_in_flight"] == 0)
        assert_conserved(report)
        assert (report["ring"]["committed"], report["counters"]["sessions_lost"]) == (committed, 1)
        assert learner.read("step", committed - 32, committed).tolist() == list(range(32))
        assert learner.read("collector", committed - 32, committed).tolist() == [7] * 32
        assert report["ingress"]["segments"] == 1, "the dead one's segment is let go of once its slots are copied"


def test_publishes_that_are_found_together_with_the_death_are_committed(server: ServerProcess, children: Children) -> None:
    """The server is stopped while the collector publishes and dies. On waking it finds both at once: it reads its socket first."""
    for life in range(1, 6):
        child = start_doomed(children, server, steps=32)
        with frozen(server.child):
            write(child)
            child.kill()
        wait_report(server, has_no_collector)
        report = wait_report(server, lambda found: found["counters"]["rows_in_flight"] == 0)
        assert (report["ring"]["committed"], report["counters"]["stale_messages"]) == (32 * life, 0)
    assert_conserved(report_of(server))
