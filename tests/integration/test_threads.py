"""A client is for one thread at a time: a second one that calls while the first waits is told so, and the first goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from replay_server_client import Collector, InvalidRequest, Learner, Observer, Schema, ServerGone
from replay_server_client.admin import Admin
from replay_server_client.look import CopiedRows
from replay_server_client.turn import Turn
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


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    return start_server("--capacity", "100", "--slot-rows", "8")


@pytest.fixture
def observer(server: ServerProcess) -> Iterator[Observer]:
    """Of eight rows, with the name olga."""
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Observer.connect(server.name, run_dir=server.run_dir, name="olga") as observer,
    ):
        collector.write(ROWS)
        collector.flush()
        yield observer


def turn_of(client: Collector | Learner | Observer | Admin) -> Turn:
    match client:
        case Collector():
            return client._ingress.connection.turn
        case Learner():
            return client._engine.connection.turn
        case _:
            return client._connection.turn


def wait_until_it_waits(client: Collector | Learner | Observer | Admin) -> None:
    turn, end_s = turn_of(client), time.monotonic() + WITHIN_S
    while not turn.is_taken:
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


def test_an_observer_in_which_another_thread_waits_refuses_calls(
    server: ServerProcess, observer: Observer, second_thread: ThreadPoolExecutor
) -> None:
    chunks = observer.chunks(4)
    next(chunks)
    with frozen(server.child):
        waiting = second_thread.submit(lambda: observer.read(newest=8, timeout=WITHIN_S)["mark"].tolist())
        wait_until_it_waits(observer)
        calls = (observer.window, lambda: observer.read(newest=1), observer.schema, observer.capture, lambda: next(chunks))
        for call in (*calls, observer.close):
            refused("observer olga", call)
    assert waiting.result(WITHIN_S) == list(range(8))
    assert observer.window() == (0, 8)  # in turn, from this thread


def test_a_read_of_an_observer_is_one_call_also_while_rows_are_copied(
    observer: Observer, second_thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, may_go_on, fields = threading.Event(), threading.Event(), CopiedRows.fields

    def slow_fields(chunk: CopiedRows, names: Sequence[str] | None) -> dict[str, npt.NDArray[np.generic]]:
        copying.set()
        assert may_go_on.wait(WITHIN_S)
        return fields(chunk, names)

    monkeypatch.setattr(CopiedRows, "fields", slow_fields)
    reading = second_thread.submit(lambda: observer.read(newest=8)["mark"].tolist())
    assert copying.wait(WITHIN_S)
    try:
        refused("observer olga", observer.window)
    finally:
        may_go_on.set()
    assert reading.result(WITHIN_S) == list(range(8))


def test_an_admin_in_which_another_thread_waits_refuses_calls(
    server: ServerProcess, second_thread: ThreadPoolExecutor, tmp_path: Path
) -> None:
    with Admin.connect(server.name, run_dir=server.run_dir) as admin:
        with frozen(server.child):
            waiting = second_thread.submit(admin.set, "tolerance", "64", timeout=WITHIN_S)
            wait_until_it_waits(admin)
            for call in (
                lambda: admin.set("tolerance", "32"),
                admin.trace_start,
                lambda: admin.trace_stop(tmp_path / "trace.json"),
                admin.stop,
                admin.close,
            ):
                refused("admin", call)
        waiting.result(WITHIN_S)
        admin.set("tolerance", "32")


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
