"""What a draw costs on the device, the gather left out: uniform, by recency, in proportion to priority.

draw        one draw of 2,048 rows. On CUDA the GPU's time of one replay of a captured graph, between events, after a write of 256 MB that
            leaves none of the column in the cache; on the CPU the time of the call
prioritized over windows of 1,000,000 and 10,000,000 rows with headroom, every record valid, or half of them absent; with age bias
passes      (--passes, CUDA) what a prioritized draw is made of, each over the ring and alone in a graph
Each draw plain and, as ``Learner.connect(compile=True)`` does it, compiled; targets are judged on the faster of the two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import benchmark
import torch
from benchmark import OURS, Options, Report, Series, synchronize
from replay_server_client.compiled import HowToRun, compiled, plain
from replay_server_client.draw import Drawn, draw_uniform, uniform
from replay_server_client.lap_column import LapColumn
from replay_server_client.prioritized import PriorityDraw, prioritized
from replay_server_client.recent import draw_recent, recent

BATCH_ROWS = 2048
TARGETS_US = {1_000_000: 150.0, 10_000_000: 250.0}
CACHE_BYTES = 256 << 20
WARM_UP_CALLS = 3
BLOCK_ROWS = 64
COMPILED = f"{OURS}, compiled"

Work = Callable[[], object]


def main() -> None:
    options = benchmark.parse(__doc__, extend)
    report = Report("bench_draws", options)
    for rows in options.pick((1_000_000, 10_000_000), (10_000,)):
        case = Case(rows, torch.device(options.device), options.seed)
        sides = {OURS: case.draws(plain), **({COMPILED: case.draws(compiled)} if options.device == "cuda" else {})}
        for name in sides[OURS]:
            draws = {side: partial(draw_us, options, draw[name]) for side, draw in sides.items()}
            report.measure(f"draw of {BATCH_ROWS} rows from {rows:,}", f"{name}, {rows:,}", "µs", draws)
        if options.arguments.passes and options.device == "cuda":
            for name, work in case.passes():
                report.measure(f"pass over {rows:,} rows", f"{name}, {rows:,}", "µs", {OURS: partial(draw_us, options, work)})
        if options.device == "cuda" and rows in TARGETS_US:
            for state in ("all valid", "half absent"):
                what = f"prioritized, {state}, {rows:,}"
                if fastest := fastest_of(report, what):
                    report.expect(f"{what}, µs, {fastest.side}", fastest.median, at_most=TARGETS_US[rows])
    report.publish()


def extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--passes", action="store_true", help="measure every pass of a prioritized draw by itself as well (CUDA)")


def fastest_of(report: Report, what: str) -> Series | None:
    """The faster side of what was measured."""
    return min((series for series in report.series if series.what == what), key=lambda series: series.median, default=None)


class Case:
    """A window of ``rows`` rows that wraps in its ring, and columns of random priorities for it."""

    def __init__(self, rows: int, device: torch.device, seed: int) -> None:
        self.ring_rows = ring_rows = rows + max(BATCH_ROWS, min(rows // 8, 131_072))
        tail = ring_rows + ring_rows // 2
        generator = torch.Generator(device).manual_seed(seed)
        seqs = torch.arange(tail, tail + ring_rows, device=device)
        self.columns = {}
        for state, absent_share in (("all valid", 0.0), ("half absent", 0.5)):
            column = LapColumn.of(torch.zeros(ring_rows + 1, 2, dtype=torch.int32, device=device))
            is_absent = torch.rand(ring_rows, generator=generator, device=device) < absent_share
            column.laps[seqs % ring_rows] = (1 + seqs // ring_rows - is_absent.long()).int()
            column.priorities.copy_(torch.rand(ring_rows, generator=generator, device=device))
            self.columns[state] = column
        self.drawn = Drawn.of(BATCH_ROWS, device)
        self.drawn.parameters[:3] = torch.tensor((seed, tail, rows))
        self.alpha, self.beta, self.half_life_rows = torch.tensor((0.6, 0.4, rows / 10), dtype=torch.float64, device=device).unbind()

    def draws(self, how: HowToRun) -> dict[str, Work]:
        drawn, ring_rows = self.drawn, self.ring_rows
        by = PriorityDraw(drawn.seqs.device, how(prioritized))
        found: dict[str, Work] = {
            "uniform": partial(draw_uniform, drawn, ring_rows, how(uniform)),
            "recent": partial(draw_recent, drawn, ring_rows, self.half_life_rows, how(recent)),
        }
        for state, column in self.columns.items():
            found[f"prioritized, {state}"] = partial(by.draw, drawn, ring_rows, column, self.alpha, self.beta)
        column = self.columns["all valid"]
        found["prioritized, age bias"] = partial(by.draw, drawn, ring_rows, column, self.alpha, self.beta, self.half_life_rows)
        return found

    def passes(self) -> Iterator[tuple[str, Work]]:
        column, alpha = self.columns["half absent"], self.alpha
        blocks = self.ring_rows // BLOCK_ROWS
        device = column.records.device
        is_absent, lap = column.laps != 2, torch.tensor(2, dtype=torch.int32, device=device)
        values = column.priorities.clone()
        by_block = values[: blocks * BLOCK_ROWS].view(blocks, BLOCK_ROWS)
        cumulative = torch.cumsum(by_block.sum(1, dtype=torch.float64), 0)
        targets = torch.linspace(0, 1, BATCH_ROWS, dtype=torch.float64, device=device) * cumulative[-1] * 0.999
        zero = torch.zeros((), device=device)
        yield "absent", lambda: column.laps != lap
        yield "values where absent", lambda: torch.where(is_absent, -1.0, column.priorities)
        yield "power", lambda: torch.pow(values, alpha)
        yield "largest by block", lambda: torch.amax(by_block, 1)
        yield "sum by block", lambda: by_block.sum(1, dtype=torch.float64)
        yield "cumulative over blocks", lambda: torch.cumsum(cumulative, 0)
        yield "search", lambda: torch.searchsorted(cumulative, targets, right=True)
        yield "tiny kernel", lambda: zero.add_(0)


def draw_us(options: Options, draw: Work) -> float:
    """Median microseconds of one draw."""
    calls: int = options.pick(100, 5)
    if options.device == "cuda":
        return graph_us(draw, calls)
    for _ in range(WARM_UP_CALLS):
        draw()
    times_s = []
    for _ in range(options.pick(20, 5)):
        start_s = time.perf_counter()
        draw()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s) * 1e6


def graph_us(draw: Work, calls: int) -> float:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    evict = torch.zeros(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        draw()
        stream.synchronize()
        graph.capture_begin()
        draw()
        graph.capture_end()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(WARM_UP_CALLS + calls)]
        for start, end in events:
            evict.zero_()
            start.record()
            graph.replay()
            end.record()
    synchronize("cuda")
    elapsed_ms: list[float] = [start.elapsed_time(end) for start, end in events[WARM_UP_CALLS:]]
    return statistics.median(elapsed_ms) * 1e3


if __name__ == "__main__":
    main()
