"""What a learner sees when its server ends: in good order, by kill -9, and when another one takes its place."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from replay_server_client import Collector, ForkedClient, Learner, Schema, ServerClosing, ServerGone
from support.processes import Children
from support.servers import ServerProcess, spawn_server

SCHEMA = Schema.of(stamp="int64", extra=("float32", 6))
OPTIONS = ("--capacity", "1000", "--slot-rows", "16")


def fill(server: ServerProcess, first: int, n: int) -> int:
    with Collector.connect(server.name, schema=SCHEMA, lanes=1, run_dir=server.run_dir) as collector:
        collector.write({"stamp": np.arange(first, first + n), "extra": np.zeros((n, 6), np.float32)})
        return collector.flush()


def sweep(children: Children, killed: ServerProcess) -> None:
    """The next server of the name removes what a killed one left."""
    assert spawn_server(children, killed.run_dir, *OPTIONS, name=killed.name).stop() == 0


def test_learner_goes_on_with_the_next_server_and_old_batches_stay(children: Children, crash_dir: Path) -> None:
    server = spawn_server(children, crash_dir, *OPTIONS)
    with Learner.connect(server.name, run_dir=crash_dir) as learner:
        fill(server, 0, 100)
        batch = learner.sample(16)
        seen, address = batch["stamp"].clone(), batch["stamp"].data_ptr()
        server.kill()
        server = spawn_server(children, crash_dir, *OPTIONS, name=server.name)
        fill(server, 5000, 50)
        assert torch.equal(batch["stamp"], seen)
        stamps = [learner.sample(16)["stamp"].clone() for _ in range(4)]
        assert all(int(found.min()) >= 5000 for found in stamps[2:])
        assert learner.statistics().generations == 2
        assert address in {learner.sample(16)["stamp"].data_ptr() for _ in range(2)}
        learner.close()
        assert server.stop() == 0


def test_killed_server_without_a_successor_raises_within_the_timeout(children: Children, crash_dir: Path) -> None:
    server = spawn_server(children, crash_dir, *OPTIONS)
    with Learner.connect(server.name, run_dir=crash_dir, prefetch=0) as learner:
        fill(server, 0, 100)
        learner.sample(16)
        server.kill()
        before = time.monotonic()
        with pytest.raises(ServerGone):
            learner.sample(16, timeout=0.5)
        assert time.monotonic() - before < 0.8
    sweep(children, server)


def test_learner_at_rest_costs_no_cpu_after_its_server_was_killed(children: Children, crash_dir: Path) -> None:
    server = spawn_server(children, crash_dir, *OPTIONS)
    with Learner.connect(server.name, run_dir=crash_dir) as learner:
        fill(server, 0, 100)
        learner.sample(16)
        server.kill()
        before = time.process_time()
        threading.Event().wait(1.0)
        assert time.process_time() - before < 0.1
    sweep(children, server)


def test_learner_at_rest_costs_no_cpu(children: Children, run_dir: Path) -> None:
    server = spawn_server(children, run_dir, *OPTIONS)
    with Learner.connect(server.name, run_dir=run_dir) as learner:
        fill(server, 0, 100)
        learner.sample(16)
        threading.Event().wait(0.2)
        before = time.process_time()
        threading.Event().wait(1.0)  # an idle second is what is promised to cost nothing
        assert time.process_time() - before < 0.1
    assert server.stop() == 0


def test_batches_end_when_the_server_stops_in_good_order(children: Children, run_dir: Path) -> None:
    server = spawn_server(children, run_dir, *OPTIONS)
    with Learner.connect(server.name, run_dir=run_dir) as learner:
        fill(server, 0, 100)
        taken = 0
        for _ in learner.batches(16):
            taken += 1
            if taken == 3:
                stopped = threading.Thread(target=server.stop)
                stopped.start()
        stopped.join()
        assert taken >= 3
        assert server.stop() == 0
        with pytest.raises(ServerGone, match="no server called"):
            learner.sample(16, timeout=0.2)


def test_idle_learner_lets_a_closing_server_go_at_once(children: Children, run_dir: Path) -> None:
    server = spawn_server(children, run_dir, *OPTIONS)
    with Learner.connect(server.name, run_dir=run_dir) as learner:
        fill(server, 0, 100)
        learner.sample(16)
        before = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - before < 1.5
        with pytest.raises(ServerClosing):
            learner.sample(16)


def test_forked_child_is_refused_and_its_end_disturbs_nothing(children: Children, run_dir: Path) -> None:
    server = spawn_server(children, run_dir, *OPTIONS)
    with Learner.connect(server.name, run_dir=run_dir) as learner:
        fill(server, 0, 100)
        learner.sample(16)
        pid = os.fork()
        if pid == 0:
            os._exit(_use_in_child(learner))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(learner.sample(16)) == 16
        assert learner.statistics().generations == 1
    assert server.stop() == 0


def _use_in_child(learner: Learner) -> int:
    uses = (lambda: learner.sample(16), learner.progress, learner.wait_ready, lambda: learner.post("x", {"a": np.zeros(1)}))
    for use in uses:
        try:
            use()
        except ForkedClient:
            continue
        return 1
    learner.close()
    return 0


def test_learner_collected_in_its_own_background_thread_closes_all_the_same(
    children: Children, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = spawn_server(children, run_dir, *OPTIONS)
    fill(server, 0, 100)
    learner = Learner.connect(server.name, run_dir=run_dir)
    learner.sample(16)
    engine, thread = learner._engine, learner._engine._thread
    assert thread is not None
    learner._finalizer.detach()
    advance = engine.conversation.advance

    def advance_and_collect() -> None:
        engine.abandon()
        advance()

    monkeypatch.setattr(engine.conversation, "advance", advance_and_collect)
    engine.wake()
    thread.join(5.0)
    assert not thread.is_alive()
    with pytest.raises(ServerGone, match="closed"):
        learner.sample(16)
    assert server.stop() == 0


def test_sampler_of_a_dropped_learner_says_that_it_is_closed(children: Children, run_dir: Path) -> None:
    server = spawn_server(children, run_dir, *OPTIONS)
    fill(server, 0, 100)
    learner = Learner.connect(server.name, run_dir=run_dir)
    sampler = learner.sampler(16)
    assert sampler.sample().number == 1
    del learner
    gc.collect()
    with pytest.raises(ServerGone, match="closed"):
        sampler.sample()
    assert server.stop() == 0


def test_a_dropped_learner_is_closed_also_where_its_thread_saw_that_first(
    children: Children, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = spawn_server(children, run_dir, *OPTIONS)
    fill(server, 0, 100)
    threads = threading.active_count()
    learner = Learner.connect(server.name, run_dir=run_dir)
    learner.sample(16)
    engine = learner._engine
    close, let_go = engine.close, engine.conversation.let_go

    def close_second() -> None:
        end = time.monotonic() + 5
        while threading.current_thread() is threading.main_thread() and not engine._is_closed and time.monotonic() < end:
            time.sleep(0.001)
        close()

    def let_go_slowly() -> None:
        time.sleep(0.2)
        let_go()

    monkeypatch.setattr(engine, "close", close_second)
    monkeypatch.setattr(engine.conversation, "let_go", let_go_slowly)
    del learner
    assert threading.active_count() == threads
    assert server.stop() == 0


def test_dropped_learner_says_bye(children: Children, run_dir: Path) -> None:
    server = spawn_server(children, run_dir, *OPTIONS)
    fill(server, 0, 100)
    threads = threading.active_count()
    learner = Learner.connect(server.name, run_dir=run_dir)
    learner.sample(16)
    del learner
    assert threading.active_count() == threads
    before = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - before < 1.5
