"""Ctrl-C ends whatever a client waits for within a second, also while its server is stopped, and leaves no slot, lease or thread behind."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.freeze import frozen
from support.processes import Children
from support.reports import assert_conserved, wait_report
from support.servers import ServerProcess


def wait_in(call: str, name: str, run_dir: str) -> dict[str, Any]:
    """Waits for half a minute in a call that nothing ends but Ctrl-C, once the server is stopped; says "waits" before that."""
    import signal
    import threading

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # before imports start threads
    from replay_server_client import Collector, Learner
    from support.markers import MARKERS, marker_steps

    def write(collector: Collector) -> None:
        for step in range(4, 10_000, 16):
            collector.write(marker_steps(0, 1, step, 16), timeout=30)

    def flush(collector: Collector) -> None:
        collector.write(marker_steps(0, 1, 4, 4))
        collector.flush(30)

    told = {"is_interrupted": False, "threads": 0}
    with (
        Collector.connect(name, schema=MARKERS, run_dir=run_dir) as collector,
        Learner.connect(name, device="cpu", run_dir=run_dir, prefetch=0) as learner,
    ):
        collector.write(marker_steps(0, 1, 0, 4))
        collector.flush()
        learner.sample(4)
        calls: dict[str, Callable[[], object]] = {
            "write": lambda: write(collector),
            "flush": lambda: flush(collector),
            "sample": lambda: learner.sample(8, min_committed=10**9, timeout=30),
            "wait_ready": lambda: learner.wait_ready(30),
        }
        print("waits", flush=True)
        signal.sigwait([signal.SIGUSR1])
        try:
            calls[call]()
        except KeyboardInterrupt:
            told["is_interrupted"] = True
            print("interrupted", flush=True)
            signal.sigwait([signal.SIGUSR1])  # the server goes on: closing waits for it
    told["threads"] = threading.active_count()
    return told


@pytest.mark.parametrize("call", ["write", "flush", "sample", "wait_ready"])
def test_ctrl_c_ends_a_wait_within_a_second(server: ServerProcess, children: Children, call: str) -> None:
    child = children.run(wait_in, call, server.name, str(server.run_dir))
    child.wait_for("waits")
    with frozen(server.child):
        child.send_signal(signal.SIGUSR1)
        threading.Event().wait(0.5)  # it waits by then; if not yet, it is interrupted all the same
        child.send_signal(signal.SIGINT)
        before_s = time.monotonic()
        child.wait_for("interrupted")
        assert time.monotonic() - before_s < 1.0
    child.send_signal(signal.SIGUSR1)
    assert child.result() == {"is_interrupted": True, "threads": 1}
    report = wait_report(server, lambda found: not found["collectors"] and not found["learners"])
    assert report["counters"]["sessions_lost"] == 0
    assert_conserved(report)
