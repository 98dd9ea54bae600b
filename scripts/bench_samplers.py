"""What kinds of requests cost the device, draw and gather together, and what the columns they need cost ingest.

batch    one recipe, from grant to whole rows. On CUDA the GPU's time of one replay of its captured graph after the cache was emptied; on
         the CPU the time of the call. 1,720 bytes a row, 64 lanes, episodes of 200 steps. Plain and, as
         ``Learner.connect(compile=True)`` does it, compiled; targets are judged on the faster side of each
ingest   write, as in bench_ingest, with the link and priority columns and without, in turns
"""

from __future__ import annotations

import statistics
from functools import partial

import benchmark
import torch
from bench_draws import COMPILED, draw_us, fastest_of
from bench_ingest import gb_per_s
from benchmark import OURS, Options, Report, transition_schema
from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.compiled import HowToRun, compiled, plain
from replay_server_client.draw import Parameters
from replay_server_client.lap_column import LapColumn
from replay_server_client.recipe import Recipe, take_by_numpy, take_by_torch
from replay_server_client.request import Request
from replay_server_client.ring_tensors import RingTensors

LANES = 64
EPISODE_STEPS = 200
WITH, WITHOUT = "link and priority", "no columns"


def main() -> None:
    options = benchmark.parse(__doc__)
    report = Report("bench_samplers", options)
    ring_rows = options.pick(1_000_000 if options.device == "cuda" else 100_000, 4096)
    ring = make_ring(ring_rows, torch.device(options.device), options.seed)
    for rows in options.pick((2048, 16_384) if options.device == "cuda" else (256, 2048), (64,)):
        for name, request in requests(rows).items():
            sides = {OURS: plain, **({COMPILED: compiled} if options.device == "cuda" else {})}
            measures = {side: partial(batch_us, options, ring, request, how) for side, how in sides.items()}
            report.measure(f"batch of {rows:,} rows", f"{name}, {rows:,}", "µs", measures)
        n_step, one_step = fastest_of(report, f"n-step 3, {rows:,}"), fastest_of(report, f"uniform, {rows:,}")
        if options.device == "cuda" and n_step and one_step:
            what = f"{n_step.what}, {n_step.side} / {one_step.what}, {one_step.side}"
            report.expect(what, n_step.median / one_step.median, at_most=2.0)
    collectors, slot_rows = options.pick((8, 4096) if options.device == "cuda" else (1, 512), (1, 256))
    for columns in (WITHOUT, WITH):
        kept = ("link", "priority") if columns == WITH else ()
        rates = gb_per_s(options, collectors, slot_rows, depth=2, is_refilled=True, columns=kept)
        report.add("ingest", f"write, {columns}", OURS, "GB/s", rates)
    if options.device == "cuda":
        report.expect_ratio_of(f"write, {WITH}", f"write, {WITHOUT}", at_least=0.8)
    report.publish()


def requests(rows: int) -> dict[str, Request]:
    sequences = partial(Request.sequences, rows // 64, length=64, burn_in=0, stride=1)
    return {
        "uniform": Request.transitions(rows),
        "recent": Request.transitions(rows, half_life_rows=100_000.0),
        "priority": Request.transitions(rows, by="priority"),
        "n-step 3": Request.transitions(rows, n_step=3),
        "n-step 5": Request.transitions(rows, n_step=5),
        "sequences of 64": sequences(crosses_episodes=False),
        "sequences of 64, crossing": sequences(crosses_episodes=True),
    }


def make_ring(ring_rows: int, device: torch.device, seed: int) -> RingTensors:
    """A full ring whose rows lie lane after lane, with a link to the row of the next step and random priorities."""
    schema = transition_schema()
    rows = torch.zeros(ring_rows, schema.stride, dtype=torch.uint8, device=device)
    index = torch.arange(ring_rows, device=device)
    terminated = schema["terminated"]
    rows[:, terminated.offset : terminated.end].view(torch.float32)[:, 0] = (index // LANES % EPISODE_STEPS == EPISODE_STEPS - 1).float()
    column = LapColumn.of(torch.ones(ring_rows + 1, 2, dtype=torch.int32, device=device))
    column.priorities.copy_(torch.rand(ring_rows, generator=torch.Generator(device).manual_seed(seed), device=device))
    return RingTensors(rows, link=(index + LANES) % ring_rows, priority=column)


def batch_us(options: Options, ring: RingTensors, request: Request, how: HowToRun) -> float:
    """Median microseconds of one batch."""
    memory = BatchBuffer(0, transition_schema(), request, ring.rows.device)
    recipe = Recipe(memory, ring, take_by_torch if ring.rows.is_cuda else take_by_numpy, how)
    parameters = torch.zeros_like(memory.drawn.parameters, device="cpu")
    Parameters(options.seed + 1, 0, ring.ring_rows, alpha=0.6, beta=0.4, half_life_rows=request.half_life_rows or 0.0).write_to(
        parameters.numpy()
    )
    memory.drawn.parameters.copy_(parameters)
    return statistics.median(draw_us(options, recipe) for _ in range(3))


if __name__ == "__main__":
    main()
