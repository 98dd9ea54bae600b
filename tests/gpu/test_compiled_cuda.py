"""Compiled recipes in captured graphs give the rows of plain ones, replay after replay."""

from __future__ import annotations

import pytest
import torch
from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.compiled import HowToRun, compiled, plain
from replay_server_client.draw import Parameters
from replay_server_client.lap_column import LapColumn
from replay_server_client.recipe import Recipe, take_by_torch
from replay_server_client.request import Request
from replay_server_client.ring_tensors import RingTensors
from replay_server_protocol.schema import Schema

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CUDA = torch.device("cuda")
RING_ROWS, LANES = 5000, 8
SCHEMA = Schema.of(obs=("float32", 3), next_obs=("float32", 3), reward="float32", terminated="bool", truncated="bool")
REQUESTS = {
    "uniform": Request.transitions(256),
    "recent": Request.transitions(256, half_life_rows=300.0),
    "priority": Request.transitions(256, by="priority"),
    "priority, age bias": Request.transitions(256, by="priority", half_life_rows=300.0),
    "n-step": Request.transitions(256, n_step=3),
    "sequences": Request.sequences(16, length=6, burn_in=1, stride=2, crosses_episodes=False),
    "crossing": Request.sequences(16, length=6, burn_in=1, stride=1, crosses_episodes=True),
}


def make_ring() -> RingTensors:
    """Two laps; values and rewards are whole numbers, whose sums are exact in any order."""
    generator = torch.Generator(CUDA).manual_seed(0)
    rows = torch.zeros(RING_ROWS, SCHEMA.stride, dtype=torch.uint8, device=CUDA)
    rows[:, SCHEMA["obs"].offset] = torch.randint(0, 9, (RING_ROWS,), generator=generator, device=CUDA).byte()
    reward, rewards = SCHEMA["reward"], torch.randint(0, 9, (RING_ROWS, 1), generator=generator, device=CUDA)
    rows[:, reward.offset : reward.end].view(torch.float32).copy_(rewards)
    rows[:, SCHEMA["terminated"].offset] = (torch.rand(RING_ROWS, generator=generator, device=CUDA) < 0.1).byte()
    column = LapColumn.of(torch.ones(RING_ROWS + 1, 2, dtype=torch.int32, device=CUDA))
    column.laps[: RING_ROWS // 2] = 2
    column.priorities.copy_(torch.randint(0, 100, (RING_ROWS,), generator=generator, device=CUDA))
    return RingTensors(rows, link=(torch.arange(RING_ROWS, device=CUDA) + LANES) % RING_ROWS, priority=column)


def batches(ring: RingTensors, request: Request, how: HowToRun) -> list[dict[str, torch.Tensor]]:
    """Of four windows, by one captured graph."""
    memory = BatchBuffer(0, SCHEMA, request, CUDA)
    recipe, stream, graph = Recipe(memory, ring, take_by_torch, how), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    parameters = torch.zeros_like(memory.drawn.parameters, device="cpu")
    found = []
    Parameters(0, 0, 1).write_to(parameters.numpy())
    memory.drawn.parameters.copy_(parameters)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        recipe()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        recipe()
        graph.capture_end()
        for key, tail, size in ((1, 0, 10), (2, 0, RING_ROWS), (3, 2500, 4000), (4, 4321, 3000)):
            Parameters(key, tail, size, alpha=1.0, beta=0.4, half_life_rows=request.half_life_rows or 0.0).write_to(parameters.numpy())
            memory.drawn.parameters.copy_(parameters)
            graph.replay()
            stream.synchronize()
            found.append({"rows": memory.rows.clone(), **{name: result.clone() for name, result in memory.results.items()}})
        stream.synchronize()  # before the batch's memory is free: the allocator doesn't know that this stream still copies it
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_compiled_recipes_fill_the_rows_of_plain_ones(name: str) -> None:
    ring = make_ring()
    for expected, found in zip(*(batches(ring, REQUESTS[name], how) for how in (plain, compiled)), strict=True):
        if "age bias" in name and "priority" in name:  # sums of powers of 2 that a compiler may round otherwise: a draw at their edge moves
            assert (found["seqs"] == expected["seqs"]).float().mean() > 0.99
            continue
        for part, value in expected.items():
            if value.is_floating_point():
                torch.testing.assert_close(found[part], value, rtol=1e-5, atol=0)
            elif part != "rows" or "n-step" not in name:
                assert torch.equal(found[part], value), part
            else:  # gamma makes rewards of sums that a compiler may round otherwise
                reward = SCHEMA["reward"]
                ours, theirs = (rows[:, reward.offset : reward.end] for rows in (value, found[part]))
                torch.testing.assert_close(theirs.view(torch.float32), ours.view(torch.float32), rtol=1e-5, atol=0)
                ours.zero_()
                theirs.zero_()
                assert torch.equal(found[part], value)
