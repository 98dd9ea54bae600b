"""Collector and learner in step, two ways: a seq is handed over, or the limiter takes turns. Windows show whose turn it was."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np
import pytest
from replay_server_client import Collector, Learner, Schema
from support.processes import Children
from support.rarely import rarely
from support.reports import report_of
from support.servers import ServerProcess

SCHEMA = Schema.of(mark="int64")
SLOT_ROWS, BATCH_ROWS, TURNS = 8, 16, 25


def collect_in_step(name: str, run_dir: str, slot_rows: int, turns: int) -> int:
    """Writes and flushes one slot after another, as fast as it may."""
    import numpy as np
    from replay_server_client import Collector, Schema

    seq = 0
    with Collector.connect(name, schema=Schema.of(mark="int64"), run_dir=run_dir) as collector:
        for turn in range(turns):
            collector.write({"mark": np.arange(turn * slot_rows, (turn + 1) * slot_rows)}, timeout=20)
            seq = collector.flush(20)
    return seq


@pytest.mark.parametrize("is_told_ahead", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2, *rarely(1)])
def test_a_seq_handed_over_keeps_collector_and_learner_in_step(server: ServerProcess, prefetch: int, is_told_ahead: bool) -> None:
    seqs: queue.Queue[int] = queue.Queue()
    turn_of_collector = threading.Semaphore(1)
    errors: list[BaseException] = []

    def collect() -> None:
        try:
            with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
                for turn in range(TURNS):
                    assert turn_of_collector.acquire(timeout=20)
                    collector.write({"mark": np.arange(turn * SLOT_ROWS, (turn + 1) * SLOT_ROWS)})
                    seqs.put(collector.flush())
        except BaseException as error:
            errors.append(error)
            raise

    collecting = threading.Thread(target=collect)
    collecting.start()
    try:
        with Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=prefetch) as learner:
            sampler = learner.sampler(BATCH_ROWS)
            for turn in range(TURNS):
                if is_told_ahead:
                    sampler.expect((turn + 1) * SLOT_ROWS)
                seq = seqs.get(timeout=20)
                batch = sampler.sample(min_committed=seq)
                assert batch.window == (0, (turn + 1) * SLOT_ROWS)
                assert (batch["mark"] == batch.seqs).all()
                turn_of_collector.release()
    finally:
        collecting.join(30)
    assert not errors


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("updates", [3, *rarely(1)])
def test_the_limiter_takes_turns_without_a_word_between_the_two(
    start_server: Callable[..., ServerProcess], children: Children, updates: int, prefetch: int
) -> None:
    ratio, tolerance = updates * BATCH_ROWS / SLOT_ROWS, (1 + updates) * BATCH_ROWS // 2
    limits = ("--samples-per-insert", str(ratio), "--tolerance", str(tolerance), "--learning-starts", str(SLOT_ROWS // 2), "--lease", "30")
    server = start_server("--capacity", "1000", "--slot-rows", str(SLOT_ROWS), *limits)
    collecting = children.run(collect_in_step, server.name, str(server.run_dir), SLOT_ROWS, TURNS)
    with Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=prefetch) as learner:
        windows = [learner.sample(BATCH_ROWS, timeout=20).window[1] for _ in range(TURNS * updates)]
        assert windows == [(turn + 1) * SLOT_ROWS for turn in range(TURNS) for _ in range(updates)]
        assert collecting.result() == TURNS * SLOT_ROWS
        flow = report_of(server)["flow"]
        assert abs(flow["sampled_rows"] - ratio * flow["inserted_rows"]) <= tolerance


def test_free_running_sides_never_wait_for_each_other(server: ServerProcess, children: Children) -> None:
    collecting = children.run(collect_in_step, server.name, str(server.run_dir), SLOT_ROWS, TURNS)
    assert collecting.result() == TURNS * SLOT_ROWS
    with Learner.connect(server.name, run_dir=server.run_dir, device="cpu") as learner:
        for _ in range(3 * TURNS):
            assert learner.sample(BATCH_ROWS).window == (0, TURNS * SLOT_ROWS)
    seconds = report_of(server)["flow"]["time_in_state_s"]
    assert seconds["collectors_wait_for_samples"] == seconds["learners_wait_for_inserts"] == 0
