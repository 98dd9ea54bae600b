"""A learner is stopped in the middle of a gather, past its lease: ingest goes on, and the torn batch is never handed out."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from replay_server_client import Collector
from support.markers import MARKERS, marker_steps
from support.processes import Child, Children
from support.raw_client import RawLearner
from support.reports import assert_conserved, wait_report
from support.servers import ServerProcess

LEASE_S = 0.3


def learn(name: str, run_dir: str, prefetch: int) -> dict[str, Any]:
    """Samples; the second gather stops the process when it has read half of its rows."""
    from replay_server_client import Learner
    from support.markers import is_whole
    from support.points import arm

    arm("gathering", 2, lambda: True, lambda: print("stops", flush=True))
    windows = []
    with Learner.connect(name, device="cpu", prefetch=prefetch, run_dir=run_dir) as learner:
        for _ in range(6):
            batch = learner.sample(64, timeout=20)
            windows.append(batch.window)
            assert is_whole(batch.fields).all()
            assert (batch["step"] == batch.seqs).all(), "a row of another seq"
            assert batch.window[0] <= int(batch.seqs.min())
        found = learner.statistics()
    return {"windows": windows, "late": found.late}


def wait_stopped(child: Child) -> None:
    child.wait_for("stops")
    end = time.monotonic() + 5
    while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < end


def check(server: ServerProcess, children: Children, prefetch: int) -> None:
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector:
        collector.write(marker_steps(0, 1, 0, 64))
        collector.flush()
        child = children.run(learn, server.name, str(server.run_dir), prefetch)
        wait_stopped(child)
        before = time.monotonic()
        collector.write(marker_steps(0, 1, 64, 400), timeout=10)
        assert collector.flush() == 464
        assert time.monotonic() - before < LEASE_S + 1.0, "ingest waits for the lease's end and no longer"
        report = wait_report(server, lambda found: found["counters"]["leases_revoked"] >= 1)
        assert report["learners"][0]["state"] == "attached", "a stopped process is not a dead one"
        child.send_signal(signal.SIGCONT)
        found = child.result()
        assert found["late"] >= 1
        assert found["windows"][-1] == [400, 464]
        report = wait_report(server, lambda found: not found["learners"])
        assert_conserved(report)
        with RawLearner(server.endpoints) as other:
            assert other.window(1, "step")[1].tolist() == list(range(400, 464))


def test_a_batch_torn_by_the_overwriting_ring_is_dropped(start_server: Callable[..., ServerProcess], children: Children) -> None:
    check(start_server("--capacity", "64", "--slot-rows", "16", "--headroom", "16", "--lease", str(LEASE_S)), children, prefetch=0)


@pytest.mark.slow
def test_a_prefetched_batch_torn_by_the_overwriting_ring_is_dropped(start_server: Callable[..., ServerProcess], children: Children) -> None:
    check(start_server("--capacity", "64", "--slot-rows", "16", "--headroom", "16", "--lease", str(LEASE_S)), children, prefetch=1)
