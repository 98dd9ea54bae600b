"""What sampling from several servers costs, and that the union is uniform: one ring alone, and a MultiLearner of one and of more.

rate        batches a second, rows whole in the batch (synchronised at the end of each run), prefetch 1
uniformity  Pearson's chi-square over every row of the union, as standard deviations from its mean: within 5 is what a right draw gives
loss        seconds from kill -9 of one server to the next batch from the rest

On CUDA one server a GPU, up to --gpus of them, the batch on cuda:0; on the CPU as many servers with rings in host memory.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import benchmark
import numpy as np
from benchmark import OURS, Options, Report, synchronize
from replay_server_client import Collector, Learner, MultiLearner, Schema

from replay_server import ReplayServer

TIMEOUT_S = 60.0
FILL_ROWS = 4096
WARM_UP_CALLS = 20
SCHEMA = Schema.of(row="int64", x=("float32", 430))


def main() -> None:
    options = benchmark.parse(__doc__, _more)
    report = Report("bench_multi", options)
    most = servers_here(options)
    rows = options.pick(200_000 if options.device == "cuda" else 20_000, 2000)
    for batch_rows in options.pick((2048, 16_384), (256,)):
        what = f"batches of {batch_rows}"
        with shards(options, most, rows) as (names, run_dir, _):
            where: dict[str, Any] = {"run_dir": run_dir, "timeout": TIMEOUT_S, "seed": options.seed}
            for count in range(1, most + 1):
                with MultiLearner.connect(names[:count], device=target(options), **where) as learner:
                    report.measure("rate", f"{what}, union of {count}", "batches/s", {OURS: partial(rate, options, learner, batch_rows)})
            with Learner.connect(names[0], device=target(options), **where) as alone:
                report.measure("rate", f"{what}, Learner alone", "batches/s", {OURS: partial(rate, options, alone, batch_rows)})
    for count in range(1, most + 1):
        sizes = [100, 300, 600, *[500] * most][:count]
        report.add("uniformity", f"{sum(sizes)} rows of {count} shards", OURS, "σ", [uniformity(options, sizes, report)])
        report.expect(f"chi-square of {count} shards, σ from its mean", abs(report.series[-1].median), at_most=5)
    if most > 1:
        report.measure("loss", f"one of {most} killed", "s", {OURS: partial(loss_s, options, most)})
    report.publish()


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=2, help="servers, at most one a GPU on CUDA (default: 2)")
    parser.add_argument("--draws", type=int, default=1_000_000, help="rows drawn for the chi-square (default: 1,000,000)")


def servers_here(options: Options) -> int:
    if options.device == "cpu":
        return int(options.arguments.gpus)
    import torch

    return min(int(options.arguments.gpus), torch.cuda.device_count())


def target(options: Options) -> str:
    return "cuda:0" if options.device == "cuda" else "cpu"


@contextmanager
def shards(options: Options, count: int, rows: int | list[int]) -> Iterator[tuple[list[str], str, list[ReplayServer]]]:
    """Servers ``shard-i`` of ``rows`` rows each, one a GPU, in one run directory."""
    sizes = [rows] * count if isinstance(rows, int) else rows
    with tempfile.TemporaryDirectory(prefix="bench-") as run_dir, ExitStack() as stack:
        servers, first = [], 0
        for place, size in enumerate(sizes):
            device = f"cuda:{place}" if options.device == "cuda" else "cpu"
            server = ReplayServer.spawn(
                name=f"shard-{place}", run_dir=run_dir, device=device, seed=options.seed, capacity=max(size, 16_384), slot_rows=FILL_ROWS
            )
            servers.append(stack.enter_context(server))
            fill(server, first, size)
            first += size
        yield [server.name for server in servers], run_dir, servers


def fill(server: ReplayServer, first: int, size: int) -> None:
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, timeout=TIMEOUT_S) as collector:
        for start in range(0, size, FILL_ROWS):
            row = np.arange(first + start, first + min(size, start + FILL_ROWS))
            collector.write({"row": row, "x": np.zeros((len(row), 430), np.float32)}, timeout=TIMEOUT_S)
        collector.flush(timeout=TIMEOUT_S)


def rate(options: Options, learner: Learner | MultiLearner, batch_rows: int) -> float:
    calls = options.pick(500 if options.device == "cuda" else 100, 20)
    sample: Callable[..., Any] = learner.sample
    for _ in range(WARM_UP_CALLS):
        sample(batch_rows, timeout=TIMEOUT_S)
    synchronize(options.device)
    begun = time.perf_counter()
    for _ in range(calls):
        sample(batch_rows, timeout=TIMEOUT_S)
    synchronize(options.device)
    return float(calls / (time.perf_counter() - begun))


def uniformity(options: Options, sizes: list[int], report: Report) -> float:
    n = 2000
    with shards(options, len(sizes), sizes) as (names, run_dir, _):
        seen = np.zeros(sum(sizes), np.int64)
        with MultiLearner.connect(names, device=target(options), run_dir=run_dir, seed=options.seed, prefetch=2) as learner:
            for _ in range(options.pick(options.arguments.draws, 20_000) // n):
                seen += np.bincount(learner.sample(n, timeout=TIMEOUT_S)["row"].cpu().numpy(), minlength=len(seen))
    expected = seen.sum() / len(seen)
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    freedom = max(1, len(seen) - 1)
    report.raw[f"chi-square of {sizes}"] = {"draws": int(seen.sum()), "chi_square": chi_square, "degrees_of_freedom": freedom}
    return float((chi_square - freedom) / np.sqrt(2 * freedom))


def loss_s(options: Options, count: int) -> float:
    with shards(options, count, 2000) as (names, run_dir, servers):
        with MultiLearner.connect(names, device=target(options), run_dir=run_dir, seed=options.seed) as learner:
            for _ in range(WARM_UP_CALLS):
                learner.sample(256, timeout=TIMEOUT_S)
            os.kill(servers[-1].pid, signal.SIGKILL)
            begun = time.perf_counter()
            while learner.sample(256, timeout=TIMEOUT_S).counts.sizes[-1]:
                pass
            lost_s = time.perf_counter() - begun
        servers[-1].close()
        with ReplayServer.spawn(name=names[-1], run_dir=run_dir, device="cpu"):  # takes away what the killed one left
            return float(lost_s)


if __name__ == "__main__":
    main()
