"""What a batch costs: by rows, by bytes a row, and by capacity of the ring.

sample      one call without prefetch, from request to finished gather: a round trip to the server and the gather
gather      the time of the gather's kernel alone, read from the profiler, and its bytes (read and written) a second
device copy a copy of as many bytes within device memory: what the memory can do
sweep       sample calls while the capacity grows a thousandfold, the ring full each time
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import benchmark
import numpy as np
from benchmark import OURS, Options, Report, serve, slots_of_a_lap, synchronize
from replay_server_client import Collector, Learner, Schema

DEVICE_COPY = "device copy"
GATHER_KERNELS = ("index", "gather")
TIMEOUT_S = 60.0
FILL_ROWS = 4096
WARM_UP_CALLS = 20


def main() -> None:
    options = benchmark.parse(__doc__)
    report = Report("bench_gather", options)
    for row_bytes in options.pick((432, 1728, 6912), (1728,)):
        with full_ring(options, options.pick(1_000_000 if options.device == "cuda" else 100_000, 5000), row_bytes) as learner:
            for batch_rows in options.pick((256, 2048, 8192, 65_536), (256, 2048)):
                measure_batch(report, learner, batch_rows, row_bytes)
    measure_sweep(report)
    copy, gather = report.find("gather, 65536 rows × 1728 B", DEVICE_COPY), report.find("gather, 65536 rows × 1728 B")
    if copy and gather:
        report.expect("gather / device copy, 65536 rows × 1728 B", gather.median / copy.median, at_least=0.75)
    report.publish()


def measure_batch(report: Report, learner: Learner, batch_rows: int, row_bytes: int) -> None:
    options, shape = report.options, f"{batch_rows} rows × {row_bytes} B"
    report.measure("sample call", f"sample, {shape}", "µs", {OURS: lambda: sample_us(options, learner, batch_rows)})
    if options.device == "cuda":
        moved = 2 * batch_rows * row_bytes
        sides = {OURS: lambda: kernel_gb_per_s(learner, batch_rows, moved), DEVICE_COPY: lambda: copy_gb_per_s(moved // 2)}
        report.measure("gather on the device", f"gather, {shape}", "GB/s", sides)


def measure_sweep(report: Report) -> None:
    """Uniform sampling must not know how large the ring is."""
    options = report.options
    smallest = 10_000 if options.device == "cuda" else 4000
    capacities = [smallest * grown for grown in options.pick((1, 10, 100, 1000), (1, 10))]
    row_bytes = options.pick(1728 if options.device == "cuda" else 432, 432)
    medians = []
    for capacity in capacities:
        with full_ring(options, capacity, row_bytes) as learner:
            report.measure("capacity sweep", f"sample, 2048 rows of {capacity:,}", "µs", {OURS: partial(sample_us, options, learner, 2048)})
        medians.append(report.series[-1].median)
    if not options.quick:
        report.expect("sample at the largest capacity / at the smallest", medians[-1] / medians[0], at_most=1.2)


@contextmanager
def full_ring(options: Options, capacity: int, row_bytes: int) -> Iterator[Learner]:
    """A learner of a server whose ring is full and has wrapped."""
    schema = Schema.of(x=("float32", row_bytes // 4))
    rows = {"x": np.random.default_rng(options.seed).standard_normal((FILL_ROWS, row_bytes // 4), dtype=np.float32)}
    with serve(options, capacity=capacity, slot_rows=FILL_ROWS, depth=4) as server:
        where: dict[str, Any] = {"run_dir": server.run_dir, "timeout": TIMEOUT_S}
        with Collector.connect(server.name, schema=schema, lanes=1, **where) as collector:
            for _ in range(slots_of_a_lap(server, FILL_ROWS)):
                collector.write(rows)
            collector.flush(timeout=TIMEOUT_S)
            with Learner.connect(server.name, device=options.device, seed=options.seed, prefetch=0, **where) as learner:
                yield learner


def sample_us(options: Options, learner: Learner, batch_rows: int) -> float:
    """Mean microseconds of a call, over as many as fit in about half a second."""
    for _ in range(WARM_UP_CALLS):
        learner.sample(batch_rows, timeout=TIMEOUT_S)
    synchronize(options.device)
    calls: int = options.pick(1000 if batch_rows < 50_000 else 200, 50)
    start_s = time.perf_counter()
    for _ in range(calls):
        learner.sample(batch_rows, timeout=TIMEOUT_S)
    synchronize(options.device)
    return (time.perf_counter() - start_s) / calls * 1e6


def kernel_gb_per_s(learner: Learner, batch_rows: int, moved_bytes: int, calls: int = 50) -> float:
    """Gigabytes a second of the gather kernel alone: rows are the most it reads, so it is the longest of the kernels that match."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            learner.sample(batch_rows, timeout=TIMEOUT_S)
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA" and any(word in event.name.lower() for word in GATHER_KERNELS):
            totals.setdefault(event.name, []).append(event.time_range.elapsed_us())
    if not totals:
        raise RuntimeError("the profiler saw no gather kernel; is CUPTI usable here?")
    longest_us = max(totals.values(), key=sum)
    return moved_bytes / (sorted(longest_us)[len(longest_us) // 2] * 1e-6) / 1e9


def copy_gb_per_s(n_bytes: int, copies: int = 50) -> float:
    """Bytes read and written a second by copies within the device, from fresh memory each time, back to back in a graph."""
    import torch

    blocks = max(2, min(copies, (4 << 30) // n_bytes))
    source = torch.zeros(blocks, n_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    target.copy_(source[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for index in range(copies):
            target.copy_(source[index % blocks])
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return 2 * n_bytes * copies / (elapsed_ms * 1e-3) / 1e9


if __name__ == "__main__":
    main()
