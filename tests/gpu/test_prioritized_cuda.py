"""Prioritized draws on CUDA: the rows of the CPU where float64 is exact, in a captured graph, with counters that nothing waits for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from replay_server_client.draw import PARAMETERS, Drawn, draw_uniform
from replay_server_client.lap_column import REFUSED, STALE, LapColumn, Update, check_priorities, scatter
from replay_server_client.prioritized import PriorityDraw
from replay_server_client.recent import draw_recent
from torch import Tensor

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
N = 2048


def make_records(ring_rows: int, tail: int, size: int, seed: int) -> Tensor:
    """Integers as values, a quarter of the records absent; outside the window what must not be read."""
    random = np.random.default_rng(seed)
    seqs = np.arange(tail, tail + ring_rows)
    is_inside = seqs < tail + size
    records = np.zeros((ring_rows + 1, 2), dtype=np.int32)
    records[seqs % ring_rows, 0] = 1 + seqs // ring_rows - (is_inside & (random.integers(0, 4, ring_rows) == 0))
    records[seqs % ring_rows, 1] = np.where(is_inside, random.integers(0, 1000, ring_rows), 1e30).astype(np.float32).view(np.int32)
    return torch.from_numpy(records)


def scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=device)


def draw_on(device: torch.device, records: Tensor, parameters: tuple[int, int, int], alpha: float, beta: float) -> Drawn:
    ring_rows = len(records) - 1
    drawn = Drawn.of(N, device)
    drawn.parameters[:3] = torch.tensor(parameters)
    column = LapColumn.of(records.to(device))
    PriorityDraw(device).draw(drawn, ring_rows, column, scalar(alpha, device), scalar(beta, device))
    return drawn


@contextmanager
def without_waiting() -> Iterator[None]:
    """Fails where a call waits for the device."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)  # it is a prototype, torch says
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """On a stream of its own, once run before: the kernels are loaded."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        work()
        graph.capture_end()
    return graph


@pytest.mark.parametrize("ring_rows", [1, 7, 1023, 5000, 1_000_003])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_cpu_and_cuda_draw_the_same_rows_for_integers(ring_rows: int, alpha: float) -> None:
    for size in {1, max(1, ring_rows * 7 // 8), max(1, ring_rows - 1), ring_rows}:
        for tail in (0, ring_rows // 3, 5 * ring_rows + ring_rows // 2):
            records = make_records(ring_rows, tail, size, seed=size)
            parameters = (tail + 1, tail, size)
            on_cpu, on_cuda = (draw_on(device, records, parameters, alpha, 0.4) for device in (CPU, CUDA))
            assert torch.equal(on_cuda.seqs.cpu(), on_cpu.seqs), (size, tail)
            assert torch.equal(on_cuda.indices.cpu(), on_cpu.indices)
            torch.testing.assert_close(on_cuda.weights.cpu(), on_cpu.weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("half_life_rows", [None, 20_000.0])
def test_a_captured_draw_follows_its_parameters_and_the_column(half_life_rows: float | None) -> None:
    """One graph, replayed over windows, alphas and records that change; beside each replay a draw that was not captured."""
    ring_rows = 100_000
    column = LapColumn.of(torch.zeros(ring_rows + 1, 2, dtype=torch.int32, device=CUDA))
    parameters = torch.zeros(PARAMETERS, dtype=torch.int64).pin_memory()
    alpha, beta = scalar(0.0, CUDA), scalar(0.0, CUDA)
    half_life = None if half_life_rows is None else scalar(half_life_rows, CUDA)
    drawns = [Drawn.of(N, CUDA) for _ in range(2)]
    draws = [PriorityDraw(CUDA) for _ in range(2)]

    def draw(which: int) -> None:
        drawns[which].parameters.copy_(parameters, non_blocking=True)
        draws[which].draw(drawns[which], ring_rows, column, alpha, beta, half_life)

    parameters[:3] = torch.tensor((0, 0, 1))
    graph = capture(lambda: draw(0))
    for number, (tail, size) in enumerate([(0, 1), (0, 80_000), (70_000, 80_000), (120_000, 1000), (199_999, 100_000)]):
        column.records.copy_(make_records(ring_rows, tail, size, number))
        parameters[:3] = torch.tensor((number, tail, size))
        alpha.fill_(0.25 * number)
        beta.fill_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        draw(1)
        assert torch.equal(drawns[0].seqs, drawns[1].seqs)
        assert torch.equal(drawns[0].weights, drawns[1].weights)
        assert int(drawns[0].seqs.min()) >= tail
        assert int(drawns[0].seqs.max()) < tail + size
    assert len(drawns[0].seqs.unique()) > N // 2


def test_neither_draws_nor_updates_wait_for_the_device() -> None:
    ring_rows = 50_000
    column = LapColumn.of(torch.zeros(ring_rows + 1, 2, dtype=torch.int32, device=CUDA))
    drawn, by, update = Drawn.of(N, CUDA), PriorityDraw(CUDA), Update.of(N, column)
    drawn.parameters[:3] = torch.tensor((1, 30_000, 40_000))
    one, flag, counts = scalar(1.0, CUDA), torch.ones(1, dtype=torch.int64, device=CUDA), torch.zeros(2, dtype=torch.int64, device=CUDA)
    values = torch.full((N,), 2.0, device=CUDA)
    values[:3] = torch.tensor((torch.nan, torch.inf, -1.0))
    zeros = torch.zeros(N, device=CUDA)
    later_tail = torch.tensor(50_000, device=CUDA)
    with without_waiting():
        draw_uniform(drawn, ring_rows)
        draw_recent(drawn, ring_rows, one)
        by.draw(drawn, ring_rows, column, one, one)
        check_priorities(values, update.is_good, counts)
        update.priorities.copy_(values)
        scatter(column, update, drawn.indices, drawn.seqs, later_tail, flag, counts)
        by.draw(drawn, ring_rows, column, one, one, one)
        column.laps.fill_(1)
        column.priorities.copy_(zeros[:1])
        drawn.parameters[1:2].zero_()
        by.draw(drawn, ring_rows, column, one, one)
    assert int(counts[REFUSED]) == 3
    assert 0.4 * N < int(counts[STALE]) < 0.6 * N
    assert int(by.all_zero) == 1


def test_a_captured_update_writes_only_when_its_flag_is_set() -> None:
    ring_rows = 5000
    column = LapColumn.of(torch.zeros(ring_rows + 1, 2, dtype=torch.int32, device=CUDA))
    update, counts = Update.of(N, column), torch.zeros(2, dtype=torch.int64, device=CUDA)
    parameters = torch.tensor((7000, 0), device=CUDA)  # tail and flag
    seqs = torch.arange(6500, 6500 + N, device=CUDA)
    indices = seqs % ring_rows
    graph = capture(lambda: scatter(column, update, indices, seqs, parameters[0], parameters[1], counts))
    update.priorities.copy_(seqs)
    graph.replay()
    assert not bool(column.records[:-1].any())
    parameters[1] = 1
    graph.replay()
    torch.cuda.synchronize()
    expected = torch.zeros(ring_rows + 1, 2, dtype=torch.int32, device=CUDA)
    due = seqs[seqs >= 7000]
    expected[due % ring_rows, 0] = (1 + due // ring_rows).int()
    expected[due % ring_rows, 1] = due.float().view(torch.int32)
    assert torch.equal(column.records[:-1], expected[:-1])
    assert counts.tolist() == [500, 0]
