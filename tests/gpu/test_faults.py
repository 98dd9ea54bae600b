"""Faults on the GPU: schedules on the CUDA ring, learners that die as soon as they have mapped it, other GPUs, rows past 2^31 elements."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replay_server_client import Collector, Learner, Schema
from replay_server_client.gather import CudaGather
from support.fault_run import outcomes, told
from support.gpu import MIB, settled_bytes, wait_used_at_most
from support.markers import MARKERS, marker_steps
from support.processes import Children
from support.reports import report_of, wait_report
from support.servers import ServerProcess, spawn_server

pytestmark = pytest.mark.gpu

SEEDS = range(100) if os.environ.get("REPLAY_TEST_ALL") else range(12)
SLACK_BYTES = 4 * MIB
CUDA = ("--device", "cuda")
KILLS, COMINGS = 20, 5
THREADS, ROUNDS = 8, 50
PAST_32_BITS_ROWS, WIDTH = 1 << 20, 2100


@pytest.mark.timeout(900)
def test_every_promise_holds_through_schedules_of_faults_on_the_cuda_ring(children: Children) -> None:
    found = outcomes(children, SEEDS, stages=2, device="cuda")
    broken = [told(outcome) for outcome in found if outcome["broken"]]
    assert not broken, "\n\n".join(broken)


def map_the_ring(name: str, run_dir: str) -> None:
    """Attaches and maps; says so and waits for its death."""
    import threading

    from replay_server_client import Learner

    with Learner.connect(name, run_dir=run_dir, device="cuda", timeout=30.0) as learner:
        learner.wait_ready(30.0)
        print("mapped", flush=True)
        threading.Event().wait()


def test_learners_killed_as_soon_as_they_have_mapped_the_ring_leave_nothing(
    start_server: Callable[..., ServerProcess], children: Children
) -> None:
    server = start_server(*CUDA, "--capacity", "36000")
    write(server, 0, 512)
    baseline = settled_bytes()
    for _ in range(4):
        victims = [children.run(map_the_ring, server.name, str(server.run_dir)) for _ in range(KILLS // 4)]
        for victim in victims:
            victim.wait_for("mapped")
            victim.kill()
        wait_report(server, lambda found: not found["learners"], within_s=2)
        wait_used_at_most(baseline + SLACK_BYTES)


def test_status_answers_within_half_a_second_while_learners_are_killed_and_come_again(
    start_server: Callable[..., ServerProcess], children: Children
) -> None:
    server = start_server(*CUDA, "--capacity", "36000")
    write(server, 0, 512)
    with attach(server, name="a") as one, attach(server, name="b") as two:
        for _ in range(COMINGS):
            victim = children.run(map_the_ring, server.name, str(server.run_dir))
            while "mapped" not in victim.output:
                answers_in_time(server)
                for learner in (one, two):
                    assert len(learner.sample(256, timeout=20.0)) == 256
            victim.kill()
            for _ in range(50):
                answers_in_time(server)


def test_threads_that_map_the_ring_at_the_same_moment_all_get_it(start_server: Callable[..., ServerProcess]) -> None:
    """As the background threads of several learners do."""
    from replay_server_client.mapping_cuda import CudaMapping

    server = start_server(*CUDA, "--capacity", "36000")
    write(server, 0, 512)
    with attach(server) as learner:
        learner.wait_ready(20.0)
        ring = learner._engine.conversation.ring
        assert ring is not None
        at, schema, device = ring.at, ring.schema, ring.device
    gate = threading.Barrier(THREADS)

    def map_and_read(_: int) -> int:
        gate.wait(20.0)
        mapping = CudaMapping(at, schema, device)
        first = int(mapping.tensors.rows[0, :8].view(torch.int64))
        gate.wait(20.0)
        mapping.close()
        return first

    with ThreadPoolExecutor(THREADS) as pool:
        found = [list(pool.map(map_and_read, range(THREADS))) for _ in range(ROUNDS)]
    assert found == [found[0]] * ROUNDS
    assert len(set(found[0])) == 1


def test_learners_of_several_threads_come_and_go(start_server: Callable[..., ServerProcess]) -> None:
    """Each maps, captures, samples and unmaps while the others do."""
    server = start_server(*CUDA, "--capacity", "36000")
    write(server, 0, 512)

    def sample_once(ordinal: int) -> int:
        with attach(server, name=f"learner-{ordinal}") as learner:
            return len(learner.sample(256, timeout=20.0))

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(sample_once, range(8 * THREADS))) == [256] * (8 * THREADS)


def test_a_learner_that_is_collected_during_a_capture_spoils_no_pinned_memory(
    start_server: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream is the next learner's by then. In a cycle, it is collected when it so happens: here, in the midst of the capture."""
    server = start_server(*CUDA, "--capacity", "36000", "--columns", "priority")
    write(server, 0, 512)
    with attach(server, name="first") as first:
        assert len(first.sample(256, by="priority", timeout=20.0)) == 256
    cycle: list[Any] = [first]
    cycle.append(cycle)
    del first, cycle
    follow, collected = CudaGather._follow, 0

    def follow_and_collect(gather: CudaGather) -> None:
        nonlocal collected
        follow(gather)
        if torch.cuda.is_current_stream_capturing():
            collected += gc.collect()

    monkeypatch.setattr(CudaGather, "_follow", follow_and_collect)
    gc.disable()
    try:
        with attach(server, name="second") as second:
            assert len(second.sample(256, by="priority", timeout=20.0)) == 256
    finally:
        gc.enable()
    assert collected
    torch.zeros(1, pin_memory=True)


def answers_in_time(server: ServerProcess) -> None:
    before_s = time.monotonic()
    report_of(server)
    assert time.monotonic() - before_s < 0.5


def test_rows_past_two_to_the_31_elements_come_back(start_server: Callable[..., ServerProcess]) -> None:
    """The last rows of the ring, whose bytes and whose elements lie beyond 32 bits; and the first ones after the wrap."""
    schema = Schema.of(mark="int64", wide=("uint8", WIDTH), tail="int64")
    server = start_server(*CUDA, "--capacity", str(PAST_32_BITS_ROWS), "--headroom", "8192", "--slot-rows", "4096")
    ring_rows = PAST_32_BITS_ROWS + 8192
    assert PAST_32_BITS_ROWS * WIDTH > 2**31
    with (
        Collector.connect(server.name, schema=schema, run_dir=server.run_dir, timeout=60.0) as collector,
        attach(server, prefetch=0) as learner,
    ):
        for first in range(0, ring_rows + 4096, 4096):
            with collector.slot(20.0) as slot:
                mark = np.arange(first, first + 4096)
                slot["mark"][:], slot["tail"][:], slot["wide"][:] = mark, 3 * mark, (mark % 251)[:, None]
                slot.rows = 4096
            if first in (0, ring_rows - 4096, ring_rows):
                judge(learner.sample(8192, min_committed=collector.flush(20.0), max_age_rows=4096, timeout=20.0), first)
        judge(learner.sample(65_536, timeout=20.0), ring_rows + 4096 - PAST_32_BITS_ROWS)


def judge(batch: Any, oldest: int) -> None:
    mark = batch["mark"]
    assert torch.equal(mark, batch.seqs)
    assert int(mark.min()) >= oldest
    assert torch.equal(batch["tail"], 3 * mark)
    assert (batch["wide"] == (mark % 251)[:, None].to(torch.uint8)).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_ring_on_another_gpu_is_found_by_its_uuid_not_by_its_number(children: Children, crash_dir: Path) -> None:
    """The server sees the second GPU alone, as its cuda:0; here both are visible."""
    server = spawn_server(children, crash_dir, *CUDA, "--capacity", "1000", within=("env", "CUDA_VISIBLE_DEVICES=1"))
    write(server, 0, 64)
    with Learner.connect(server.name, run_dir=server.run_dir, device="auto", timeout=20.0) as learner:
        batch = learner.sample(32, timeout=20.0)
        assert batch["step"].device == torch.device("cuda", 1)
        assert torch.equal(batch["step"], batch.seqs)
    assert str(torch.cuda.get_device_properties(1).uuid) in report_of(server)["device"]["uuid"]
    assert server.stop() == 0


def attach(server: ServerProcess, **options: Any) -> Learner:
    return Learner.connect(server.name, run_dir=server.run_dir, device="cuda", timeout=20.0, **options)


def write(server: ServerProcess, first: int, rows: int) -> None:
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir, timeout=20.0) as collector:
        collector.write(marker_steps(0, 1, first, rows))
        collector.flush(20.0)
