"""n-step rows and sequences inside a captured CUDA graph equal those of the CPU to the bit, replay after replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replay_server_client.nstep import NStep, NStepOutputs
from replay_server_client.sequences import WindowOutputs, Windows
from replay_server_protocol.schema import Schema
from support.streams import Stream, random_stream
from torch import Tensor

pytestmark = pytest.mark.gpu

N = 64
OBS = ("float32", 3)
SCHEMAS = {
    "usual": Schema.of(seq="int64", obs=OBS, reward="float32", next_obs=OBS, terminated="bool", truncated="bool"),
    "half": Schema.of(terminated="bool", obs=OBS, reward=("float16", 2), next_obs=OBS, truncated="float32", first="bool"),
    "double": Schema.of(x="uint8", next_x="uint8", reward="float64", terminated="uint16", first="uint8"),
    "bfloat16": Schema.of(obs=("bfloat16", 3), next_obs=("bfloat16", 3), reward="bfloat16", terminated="bool"),
}


class Side:
    """One device's memory: what goes in, and what a derivation writes."""

    def __init__(self, stream: Stream, results: tuple[Tensor, ...], device: torch.device) -> None:
        self.ring, self.link = stream.ring.to(device), stream.link.to(device)
        self.rows = torch.zeros((N, stream.schema.stride), dtype=torch.uint8, device=device)
        self.indices, self.seqs = torch.zeros((2, N), dtype=torch.int64, device=device)
        self.committed = torch.zeros((), dtype=torch.int64, device=device)
        self.results = (self.rows, *results)

    def start(self, ring: Tensor, link: Tensor, seqs: Tensor, committed: int) -> None:
        self.ring.copy_(ring)
        self.link.copy_(link)
        self.seqs.copy_(seqs)
        self.indices.copy_(seqs % len(ring))
        self.committed.fill_(committed)


Make = Callable[[Stream, torch.device], tuple[Side, Callable[[], None]]]


def make_nstep(stream: Stream, device: torch.device) -> tuple[Side, Callable[[], None]]:
    nstep = NStep(stream.schema, 5, 0.97, device)
    outputs = NStepOutputs(*(torch.zeros(N, dtype=dtype, device=device) for dtype in (torch.float32, torch.int64, torch.float32)))
    side = Side(stream, (outputs.discount, outputs.n_steps, outputs.bootstrap), device)

    def work() -> None:
        torch.index_select(side.ring, 0, side.indices, out=side.rows)
        nstep.derive(side.ring, side.link, side.indices, side.seqs, side.committed, side.rows, outputs)

    return side, work


def make_windows(crosses: bool) -> Make:
    def make(stream: Stream, device: torch.device) -> tuple[Side, Callable[[], None]]:
        windows = Windows(stream.schema, 6, 1, 2, crosses)
        ints = torch.zeros((2, N, 6), dtype=torch.int64, device=device)
        bools = torch.zeros((2, N, 6), dtype=torch.bool, device=device)
        outputs = WindowOutputs(ints[0], ints[1], bools[0], bools[1])
        side = Side(stream, (ints, bools), device)
        return side, lambda: windows.derive(side.ring, side.link, side.indices, side.seqs, side.committed, outputs)

    return make


def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side_stream = torch.cuda.Stream()
    with torch.cuda.stream(side_stream):
        work()  # loads the kernels, which a capture must not
    side_stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side_stream):
        work()
    return graph


def assert_equal_rewards(schema: Schema, expected: Tensor, found: Tensor) -> None:
    """Compares the rewards, NaN equal to NaN, and clears them: the bits of a NaN are the device's own."""
    reward = schema.role("reward")
    dtype: torch.dtype = getattr(torch, reward.dtype)
    ours, theirs = (rows[:, reward.offset : reward.end] for rows in (expected, found))
    torch.testing.assert_close(theirs.cpu().view(dtype), ours.view(dtype), rtol=0, atol=0, equal_nan=True)
    ours.zero_()
    theirs.zero_()


@pytest.mark.parametrize("make", [make_nstep, make_windows(False), make_windows(True)], ids=["n-step", "windows", "crossing"])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_replays_equal_the_cpu_to_the_bit_at_fixed_addresses(schema: Schema, make: Make) -> None:
    for seed in range(4):
        stream = random_stream(seed, schema)
        on_cpu, work = make(stream, torch.device("cpu"))
        on_cuda, cuda_work = make(stream, torch.device("cuda"))
        on_cuda.start(stream.ring, stream.link, torch.zeros(N, dtype=torch.int64), 1)
        graph = capture(cuda_work)
        addresses = [tensor.data_ptr() for tensor in on_cuda.results]
        for window in stream.windows():
            ring, link = stream.with_garbage_outside(window)
            seqs = torch.tensor(window)[torch.arange(N) % len(window)]
            for side in (on_cpu, on_cuda):
                side.start(ring, link, seqs, window.stop)
            work()
            graph.replay()
            assert_equal_rewards(schema, on_cpu.rows, on_cuda.rows)
            for expected, found in zip(on_cpu.results, on_cuda.results, strict=True):
                assert torch.equal(expected.view(torch.uint8), found.cpu().view(torch.uint8))
        assert addresses == [tensor.data_ptr() for tensor in on_cuda.results]
