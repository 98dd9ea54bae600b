"""A client is for one thread at a time: a second one that calls while the first waits is told so, and the first goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from replay_server_client import Collector, InvalidRequest, Learner, Schema, ServerGone
from support.freeze import frozen
from support.processes import Children
from support.servers import ServerProcess, spawn_server

SCHEMA = Schema.of(mark="int64")
WITHIN_S = 20.0
ROWS = {"mark": np.arange(8)}


@pytest.fixture
def second_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="the other") as pool:
        yield pool


def wait_until_it_waits(client: Collector | Learner) -> None:
    connection = client._ingress.connection if isinstance(client, Collector) else client._engine.connection
    end_s = time.monotonic() + WITHIN_S
    while not connection._waiting_thread:
        assert time.monotonic() < end_s
        time.sleep(0.001)


def refused(client: str, call: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequest, match=f"'MainThread' calls {client} while thread 'the other_0' waits in it: a client is for one"):
        call()


def test_a_learner_in_which_another_thread_waits_refuses_calls(
    start_server: Callable[..., ServerProcess], second_thread: ThreadPoolExecutor
) -> None:
    server = start_server("--capacity", "100", "--slot-rows", "16", "--learning-starts", "8")
    with (
        Learner.connect(server.name, device="cpu", run_dir=server.run_dir, name="anna", timeout=WITHIN_S) as learner,
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
    ):
        waiting: Future[int] = second_thread.submit(lambda: len(learner.sample(4, timeout=WITHIN_S)))
        wait_until_it_waits(learner)
        for call in (lambda: learner.sample(4), lambda: learner.wait_ready(1.0), learner.progress, lambda: learner.read(newest=1)):
            refused("learner anna", call)
        learner.statistics()  # looks at counters alone
        collector.write(ROWS)
        collector.flush()
        assert waiting.result(WITHIN_S) == 4
        assert len(learner.sample(4)) == 4  # in turn, from this thread


def test_a_collector_in_which_another_thread_waits_refuses_calls(
    start_server: Callable[..., ServerProcess], second_thread: ThreadPoolExecutor
) -> None:
    server = start_server("--capacity", "100", "--slot-rows", "8", "--depth", "2")
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, name="carl", timeout=WITHIN_S) as collector:
        collector.write(ROWS)
        collector.flush()
        with frozen(server.child):
            collector.write(ROWS)
            waiting: Future[int] = second_thread.submit(collector.flush, WITHIN_S)
            wait_until_it_waits(collector)
            for call in (lambda: collector.write(ROWS), lambda: collector.flush(1.0), lambda: collector.cut(0), collector.close):
                refused("collector carl", call)
            assert collector.statistics().rows_written == 16
        assert waiting.result(WITHIN_S) == 16
        collector.write(ROWS)
        assert collector.flush() == 24


def test_a_collector_that_waits_for_the_next_server_refuses_calls_of_another_thread(
    children: Children, crash_dir: Path, second_thread: ThreadPoolExecutor
) -> None:
    server = spawn_server(children, crash_dir, "--capacity", "100", "--slot-rows", "8")
    with Collector.connect(server.name, schema=SCHEMA, run_dir=crash_dir, name="carl") as collector:
        server.kill()
        with pytest.raises(ServerGone):
            collector.write(ROWS, timeout=0.0)  # may be the first to notice
            collector.flush()
        waiting = second_thread.submit(collector.write, ROWS, timeout=WITHIN_S)
        wait_until_it_waits(collector)
        refused("collector carl", lambda: collector.write(ROWS))
        server = spawn_server(children, crash_dir, "--capacity", "100", "--slot-rows", "8", name=server.name)
        waiting.result(WITHIN_S)
        assert collector.flush() == 8
    assert server.stop() == 0
