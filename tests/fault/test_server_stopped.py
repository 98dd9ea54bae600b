"""The server stops in good order: clients are told, loops end, waits end, nothing is left."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest
from replay_server_client import Collector, Learner, ServerClosing
from support.markers import MARKERS, marker_steps
from support.raw_client import RawClient, RawCollector, RawLearner
from support.servers import ServerProcess


def test_batches_end_and_collectors_are_told(server: ServerProcess) -> None:
    told: list[type[Exception]] = []

    def collect() -> None:
        step = 0
        try:
            with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector:
                while True:
                    collector.write(marker_steps(0, 1, step, 16))
                    step += 16
        except ServerClosing as closing:
            told.append(type(closing))

    collecting = threading.Thread(target=collect)
    collecting.start()
    batches = 0
    with Learner.connect(server.name, device="cpu", run_dir=server.run_dir) as learner:
        for batch in learner.batches(32):
            assert len(batch) == 32
            batches += 1
            if batches == 20:
                server.child.send_signal(signal.SIGTERM)
            assert batches < 100_000, "the loop must end"
    collecting.join()
    assert batches >= 20
    assert told == [ServerClosing]
    assert server.child.wait() == 0
    assert list(server.run_dir.iterdir()) == []


def test_calls_that_wait_end_at_once_when_the_server_closes(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--learning-starts", "1000")
    ended_s: dict[str, float] = {}

    def wait(name: str, call: Callable[[], object]) -> None:
        with pytest.raises(ServerClosing):
            call()
        ended_s[name] = time.monotonic()

    with (
        Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir),
        Learner.connect(server.name, device="cpu", run_dir=server.run_dir, prefetch=0) as learner,
    ):
        waiter = threading.Thread(target=wait, args=("sample", lambda: learner.sample(8, timeout=30)))
        waiter.start()
        threading.Event().wait(0.2)  # it waits by then; if not yet, it is told all the same
        server.child.send_signal(signal.SIGTERM)
        stopped_s = time.monotonic()
        waiter.join()
    assert ended_s["sample"] - stopped_s < 1


def test_a_deaf_client_delays_the_end_by_two_seconds_and_no_more(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, MARKERS), RawLearner(server.endpoints):
        before = time.monotonic()
        assert server.stop() == 0
        assert 1.5 < time.monotonic() - before < 4


def test_nobody_attaches_to_a_server_that_closes(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, MARKERS):
        server.child.send_signal(signal.SIGTERM)
        server.child.wait_for("closing")
        with pytest.raises(ServerClosing):
            RawClient(server.endpoints, "learner")
    assert server.child.wait() == 0
