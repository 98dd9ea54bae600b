"""Batches in the learner's own CUDA graphs and streams: stable addresses, the right rows, and never changed under work already queued."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replay_server_client import Batch, Collector, Learner, Schema
from support.draws import hold_stream
from support.processes import Children
from support.servers import ServerProcess, spawn_server
from torch import Tensor

pytestmark = pytest.mark.gpu

SCHEMA = Schema.of(mark="int64", obs=("float32", 30), action=("float32", 6))
CAPACITY, BATCH_ROWS = 2000, 256
WITHIN_S = 10.0


@pytest.fixture(params=["device", "host"])
def server(request: pytest.FixtureRequest, start_server: Callable[..., ServerProcess]) -> ServerProcess:
    return start_server("--device", "cuda", "--storage", request.param, "--capacity", str(CAPACITY), "--slot-rows", "256")


class Writer:
    """Rows whose ``mark`` is their seq and whose ``obs`` and ``action`` follow from it."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._seq = 0

    def write(self, n: int) -> int:
        mark = np.arange(self._seq, self._seq + n)
        self._seq += n
        rows: dict[str, Any] = {"mark": mark}
        rows["obs"] = (mark[:, None] % 1009 + np.arange(30)).astype(np.float32)
        rows["action"] = (mark[:, None] % 1013 - np.arange(6)).astype(np.float32)
        self._collector.write(rows)
        return self._collector.flush(WITHIN_S)


@pytest.fixture
def writer(server: ServerProcess) -> Iterator[Writer]:
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, timeout=WITHIN_S) as collector:
        yield Writer(collector)


def attach(server: ServerProcess, **options: Any) -> Learner:
    return Learner.connect(server.name, run_dir=server.run_dir, device="cuda", timeout=WITHIN_S, **options)


def update(batch: Batch) -> Tensor:
    """Stands for a training step: reads every field and the seqs."""
    return torch.tanh(batch["obs"].sum(1) * 1e-3) + batch["action"].abs().amax(1) + (batch["mark"] - batch.seqs)


def is_right(batch: Batch) -> bool:
    rows = bool((batch["mark"] == batch.seqs).all())
    obs = bool((batch["obs"] == batch.seqs[:, None] % 1009 + torch.arange(30, device="cuda")).all())
    return rows and obs and bool((batch["action"] == batch.seqs[:, None] % 1013 - torch.arange(6, device="cuda")).all())


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_one_graph_for_each_batch_buffer_replays_over_all_later_batches(server: ServerProcess, writer: Writer, prefetch: int) -> None:
    writer.write(CAPACITY)
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    results: dict[int, Tensor] = {}
    with attach(server, prefetch=prefetch) as learner:
        update(learner.sample(BATCH_ROWS))
        for number in range(100):
            batch = learner.sample(BATCH_ROWS, timeout=WITHIN_S)
            if batch.buffer not in graphs:
                graphs[batch.buffer] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[batch.buffer]):
                    results[batch.buffer] = update(batch)
            graphs[batch.buffer].replay()
            assert is_right(batch)
            assert torch.equal(results[batch.buffer], update(batch))
            if number % 5 == 0:
                writer.write(300)
        assert len(graphs) == prefetch + 1


def test_a_caller_on_a_stream_of_its_own_reads_whole_batches(server: ServerProcess, writer: Writer) -> None:
    writer.write(CAPACITY)
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    with attach(server) as learner:
        for number in range(60):
            with torch.cuda.stream(streams[number % 2]):
                batch = learner.sample(BATCH_ROWS, timeout=WITHIN_S)
                assert is_right(batch)
            if number % 5 == 0:
                writer.write(300)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("has_own_stream", [False, True])
def test_work_queued_before_the_next_sample_reads_unchanged_rows(
    server: ServerProcess, writer: Writer, prefetch: int, has_own_stream: bool
) -> None:
    """A long kernel stands in front of each update, so the batch buffer is asked for again long before the update has read it."""
    writer.write(CAPACITY)
    stream = torch.cuda.Stream() if has_own_stream else torch.cuda.current_stream()
    read: list[tuple[Tensor, Tensor]] = []
    with attach(server, prefetch=prefetch) as learner, torch.cuda.stream(stream):
        drawn = learner.sample(BATCH_ROWS, timeout=WITHIN_S).seqs.clone()
        for _ in range(20):
            batch = learner.sample(BATCH_ROWS, timeout=WITHIN_S)
            drawn = batch.seqs.clone()
            stream.synchronize()
            hold_stream(0.02)
            read.append((drawn, batch["mark"].clone()))
            writer.write(100)
        learner.sample(BATCH_ROWS, timeout=WITHIN_S)
        stream.synchronize()
    for seqs, mark in read:
        assert torch.equal(seqs, mark)
    assert len({int(seqs[0]) for seqs, _ in read}) > 10


def test_one_batch_buffer_shows_only_the_batch_it_was_handed_out_for(server: ServerProcess, writer: Writer) -> None:
    """Each of 300 gathers into one buffer waits behind the caller's own kernel; the caller reads at once."""
    writer.write(CAPACITY)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with attach(server, prefetch=0) as learner:
        for number in range(300):
            batch = learner.sample(BATCH_ROWS, timeout=WITHIN_S)
            assert batch.buffer == 0
            wrong += (batch["mark"] != batch.seqs).sum()
            hold_stream(0.001)
            wrong += (batch["mark"] != batch.seqs).sum()
            if number % 20 == 0:
                writer.write(300)
    assert int(wrong) == 0


def test_the_background_thread_fills_batches_while_the_caller_captures(server: ServerProcess, writer: Writer) -> None:
    writer.write(CAPACITY)
    value = torch.zeros(1000, device="cuda")
    with attach(server) as learner:
        sampler = learner.sampler(BATCH_ROWS)
        for number in range(1, 11):
            batch = sampler.sample(timeout=WITHIN_S)
            assert is_right(batch)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # in the default mode, which forbids other threads what the background thread must do
                value += 1
                wait_until(lambda: sampler._prefetch.ready(0) is not None)
                value += 1
            graph.replay()
            assert int(value[0]) == 2 * number
        assert learner.statistics().dropped == 0


def test_a_ring_is_mapped_while_the_caller_captures(server: ServerProcess, writer: Writer) -> None:
    writer.write(CAPACITY)
    value = torch.zeros(1000, device="cuda")
    for number in range(1, 4):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # in the default mode
            value += 1
            learner = attach(server)
            wait_until(partial(has_ring, learner))
            value += 1
        with learner:
            graph.replay()
            assert int(value[0]) == 2 * number
            assert is_right(learner.sample(BATCH_ROWS, timeout=WITHIN_S))


def test_a_lost_ring_is_unmapped_while_the_caller_captures(children: Children, crash_dir: Path) -> None:
    options = ("--device", "cuda", "--capacity", str(CAPACITY), "--slot-rows", "256")
    value = torch.zeros(1000, device="cuda")
    first = spawn_server(children, crash_dir, *options, name="gpu")
    with Collector.connect("gpu", schema=SCHEMA, run_dir=crash_dir, timeout=WITHIN_S) as collector:
        Writer(collector).write(CAPACITY)
    with attach(first) as learner:
        assert is_right(learner.sample(BATCH_ROWS, timeout=WITHIN_S))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value += 1
            first.kill()
            wait_until(lambda: not has_ring(learner))
            value += 1
        graph.replay()
        assert int(value[0]) == 2
        second = spawn_server(children, crash_dir, *options, name="gpu")
        with Collector.connect("gpu", schema=SCHEMA, run_dir=crash_dir, timeout=WITHIN_S) as collector:
            Writer(collector).write(CAPACITY)
            batch = learner.sample(BATCH_ROWS, timeout=WITHIN_S)
            while batch.window[1] < CAPACITY:
                batch = learner.sample(BATCH_ROWS, timeout=WITHIN_S)
            assert is_right(batch)
    assert second.stop() == 0


def has_ring(learner: Learner) -> bool:
    return learner._engine.conversation.ring is not None


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.0005)
