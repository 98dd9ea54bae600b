"""Ctrl-C ends whatever a client waits for within a second, also while its server is stopped, and leaves no slot, lease or thread behind."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from replay_server_client import Collector
from support.freeze import frozen
from support.markers import MARKERS, marker_steps
from support.processes import Children
from support.rarely import rarely
from support.raw_client import RawLearner
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


@pytest.mark.parametrize("call", ["write", "sample", *rarely("flush", "wait_ready")])
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


def be_interrupted(name: str, run_dir: str, seconds: float) -> dict[str, Any]:
    """Writes and samples while a signal handler raises every millisecond or sooner, and then once more in peace."""
    import contextlib
    import random
    import signal
    import time
    from dataclasses import asdict
    from types import FrameType

    from replay_server_client import Collector, Learner
    from support.markers import MARKERS, is_whole, marker_steps

    def raise_it(_: int, frame: FrameType | None) -> None:
        """In a call of ours alone: what this loop itself would skip is no business of the collector."""
        while frame is not None:
            if frame.f_code is Collector.write.__code__ and frame.f_lasti < 20:
                break  # it has not begun
            if frame.f_code in (Collector.write.__code__, Learner.sample.__code__):
                raise KeyboardInterrupt
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, 5e-5)

    signal.signal(signal.SIGALRM, raise_it)
    drawn, step, interrupts = random.Random(1), 16, 0
    with (
        Collector.connect(name, schema=MARKERS, run_dir=run_dir) as collector,
        Learner.connect(name, device="cpu", run_dir=run_dir) as learner,
    ):
        collector.write(marker_steps(0, 1, 0, 16))
        collector.flush()
        learner.sample(8)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            is_writing = drawn.random() < 0.6
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, drawn.uniform(5e-5, 1e-3))
                while True:
                    if is_writing:
                        step += 7
                        collector.write(marker_steps(0, 1, step - 7, 7))
                    else:
                        assert is_whole(learner.sample(8).fields).all()
            interrupts += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        begin_s = time.monotonic()
        collector.write(marker_steps(0, 1, step, 50))
        batch = learner.sample(100, min_committed=(seq := collector.flush()))
        waited_s = time.monotonic() - begin_s
        assert (batch["step"] < step + 50).all()
        return {"interrupts": interrupts, "waited_s": waited_s, "seq": seq, **asdict(collector.statistics())}


def test_calls_that_are_interrupted_anywhere_lose_no_slot_no_batch_and_no_count(
    start_server: Callable[..., ServerProcess], children: Children
) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "16", "--columns", "link", "--lease", "0.3")
    child = children.run(be_interrupted, server.name, str(server.run_dir), 0.8)
    found = child.result()
    assert found["interrupts"] > 50
    assert found["waited_s"] < 5.0
    assert (found["rows_written"], found["rows_committed"], found["free_slots"]) == (found["seq"], found["seq"], found["depth"])
    report = wait_report(server, lambda found: not found["collectors"] and not found["learners"])
    assert_conserved(report)
    assert report["ring"]["committed"] == found["seq"]
    with RawLearner(server.endpoints) as learner:
        grant, steps = learner.window(1, "step")
        links = learner.read_links(grant.tail, grant.committed)
        linked = (links[:-1] >= 0).nonzero()[0]
        assert len(linked) > 50
        assert (steps[linked + 1] == steps[linked] + 1).all(), "a link never leads over rows that an interrupted call did not place"


def be_interrupted_early(name: str, run_dir: str, rounds: int) -> float:
    """Learners and observers are interrupted while the ring is shown to them; the longest that one waited in peace afterwards."""
    import contextlib
    import random
    import signal
    import time
    from types import FrameType

    from replay_server_client import Learner, Observer

    calls = (Learner.progress.__code__, Observer.read.__code__)

    def raise_it(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code in calls:
                raise KeyboardInterrupt
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, 5e-5)

    signal.signal(signal.SIGALRM, raise_it)
    drawn, longest_s = random.Random(1), 0.0
    for _ in range(rounds):
        with (
            Learner.connect(name, device="cpu", run_dir=run_dir) as learner,
            Observer.connect(name, run_dir=run_dir) as observer,
        ):
            for call in (learner.progress, lambda looking=observer: looking.read(newest=1)):
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, drawn.uniform(5e-5, 2e-3))
                    while True:
                        call()
                signal.setitimer(signal.ITIMER_REAL, 0)
            begin_s = time.monotonic()
            learner.sample(4, timeout=10.0)
            observer.read(newest=1, timeout=10.0)
            longest_s = max(longest_s, time.monotonic() - begin_s)
    return longest_s


@pytest.mark.slow
def test_clients_interrupted_while_the_ring_is_shown_to_them_see_it_all_the_same(server: ServerProcess, children: Children) -> None:
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector:
        collector.write(marker_steps(0, 1, 0, 16))
        collector.flush()
        assert children.run(be_interrupted_early, server.name, str(server.run_dir), 12).result() < 5.0
