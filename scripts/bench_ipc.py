"""Serial tick, prefetched boundary, insert and storage of one replay shape, beside uni_rl in the same run where it is installed.

Shape: 430 float32 a row, 512 rows a tick, depth 2, capacity 4,096, 2,048 rows a batch.
  serial     write -> commit -> gather, one after the other, nothing overlapped
  boundary   4 update steps of 1 ms while a collector in its own process writes the next 512 rows; then the call that hands over the
             batch that was requested one tick ahead. "waiting": the update waits for the device; "busy": it holds the interpreter lock
  insert     one collector, in a process of its own on either side, into a ring of 1,000,000 rows
  storage    bytes on host and device at three capacities
Each run measures the last 20 of 60 ticks, well past the ring's wrap.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import benchmark
from benchmark import OURS, Options, Report, rows_of, serve, synchronize, transition_schema
from peers.uni_rl_ipc import PEER, Peer, is_importable
from replay_server_client import Collector, Learner

SLOT_ROWS, DEPTH, CAPACITY, BATCH_ROWS = 512, 2, 4096, 2048
TICKS, STEADY_TICKS, STEPS, STEP_S = 60, 20, 4, 1e-3
LONG_WAIT_MS = 0.05
GPU_CYCLES_PER_STEP = 1_400_000
TIMEOUT_S = 20.0


def main() -> None:
    options = benchmark.parse(__doc__, add_options)
    only: str | None = options.arguments.only
    report = Report(f"bench_ipc_{only}" if only else "bench_ipc", options)
    peer = Peer(SLOT_ROWS, DEPTH, BATCH_ROWS, options.seed) if options.device == "cuda" and is_importable() else None
    for part, measure in PARTS.items():
        if only in (None, part):
            measure(report, peer)
    report.publish()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=tuple(PARTS), help="one part (default: all)")


def measure_serial(report: Report, peer: Peer | None) -> None:
    sides = {OURS: lambda: steady(serial_ms(report.options))}
    if peer:
        sides[PEER] = lambda: steady(peer.serial_ms(CAPACITY, TICKS))
    report.measure("serial and boundary", "serial tick", "ms", sides)
    report.expect_ratio("serial tick", OURS, PEER, at_most=0.5)


def measure_boundaries(report: Report, peer: Peer | None) -> None:
    for kind in ("waiting", "busy"):
        measure_boundary(report, peer, kind)


def measure_boundary(report: Report, peer: Peer | None, kind: str) -> None:
    ticks: list[float] = []
    fresh: list[float] = []
    step = make_step(kind, report.options.device)

    def ours() -> float:
        run, lag_rows = boundary_ms(report.options, step)
        ticks.extend(run[-STEADY_TICKS:])
        fresh.append(sum(lag == 0 for lag in lag_rows[-STEADY_TICKS:]) / STEADY_TICKS)
        return steady(run)

    sides: dict[str, Callable[[], float]] = {OURS: ours}
    if peer:
        sides[PEER] = lambda: steady(peer.boundary_ms(CAPACITY, TICKS, STEPS, step))
    what = f"boundary, update {kind}"
    report.measure("serial and boundary", what, "ms", sides)
    report.raw[f"{what}, ticks in ms"] = ticks
    report.add("batches whose window holds all rows written", f"{what}, fresh batches", OURS, "share", fresh)
    mine = report.find(what)
    if mine and report.options.device == "cuda":
        report.expect(f"{what}, median in ms", mine.median, at_most=0.015)
        report.expect(f"{what}, share of ticks without a wait above 50 µs", short_share(ticks), at_least=0.99)
    report.expect_ratio(what, OURS, PEER, at_most=0.25 if kind == "waiting" else 0.05)


def measure_insert(report: Report, peer: Peer | None) -> None:
    capacity, duration_s = report.options.pick(1_000_000, 20_000), report.options.pick(2.0, 0.3)
    sides = {OURS: lambda: in_a_process(rows_per_s, report.options, capacity, duration_s)}
    if peer:
        sides[PEER] = lambda: in_a_process(peer.rows_per_s, capacity, duration_s)
    report.measure("insert", "insert, 1 collector", "rows/s", sides)
    report.expect_ratio("insert, 1 collector", OURS, PEER, at_least=2.5)


def measure_storage(report: Report, peer: Peer | None) -> None:
    """Not a matter of runs: the figures are the same every time, so each is taken once."""
    capacities = report.options.pick((4096, 8192, 10_000_000 if report.options.device == "cuda" else 100_000), (4096, 8192))
    found = [storage_bytes(report.options, capacity) for capacity in capacities]
    for capacity, (host_bytes, device_bytes) in zip(capacities, found, strict=True):
        report.add("storage", f"host bytes at {capacity:,} rows", OURS, "bytes", [host_bytes])
        report.add("storage", f"device bytes at {capacity:,} rows", OURS, "bytes", [device_bytes])
        if peer and capacity < 1_000_000:
            theirs = peer.storage_bytes(capacity)
            report.add("storage", f"host bytes at {capacity:,} rows", PEER, "bytes", [theirs[0]])
            report.add("storage", f"device bytes at {capacity:,} rows", PEER, "bytes", [theirs[1]])
    if report.options.device == "cuda":
        report.expect("host bytes at the largest capacity / at the smallest", found[-1][0] / found[0][0], at_most=1.0)


def serial_ms(options: Options) -> list[float]:
    """Milliseconds of each tick of a fresh server."""
    schema, ticks = transition_schema(), options.pick(TICKS, STEADY_TICKS)
    rows, spent_ms = rows_of(schema, SLOT_ROWS, options.seed), []
    with serve(options, capacity=CAPACITY, slot_rows=SLOT_ROWS, depth=DEPTH) as server:
        where: dict[str, Any] = {"run_dir": server.run_dir, "timeout": TIMEOUT_S}
        with (
            Collector.connect(server.name, schema=schema, lanes=SLOT_ROWS, **where) as collector,
            Learner.connect(server.name, device=options.device, seed=options.seed, prefetch=0, **where) as learner,
        ):
            learner.progress()  # the caller drives, as the peer's does
            for tick in range(ticks):
                start_s = time.perf_counter()
                collector.write(rows)
                learner.sample(BATCH_ROWS, min_committed=(tick + 1) * SLOT_ROWS, timeout=TIMEOUT_S)
                synchronize(options.device)
                spent_ms.append((time.perf_counter() - start_s) * 1e3)
    return spent_ms


def boundary_ms(options: Options, step: Callable[[], None]) -> tuple[list[float], list[int]]:
    """Milliseconds of each boundary call, and by how many rows its batch lags behind what was written by then: 0, it was asked to.

    The collector is a process of its own that writes one slot a tick.
    """
    ticks = options.pick(TICKS, STEADY_TICKS)
    context, spent_ms, lag_rows = multiprocessing.get_context("spawn"), [], []
    with serve(options, capacity=CAPACITY, slot_rows=SLOT_ROWS, depth=DEPTH) as server:
        go, other = context.Pipe()
        process = context.Process(target=collect_on_demand, args=(server.name, str(server.run_dir), other, options.seed), daemon=True)
        process.start()
        with Learner.connect(
            server.name, device=options.device, seed=options.seed, prefetch=1, run_dir=server.run_dir, timeout=TIMEOUT_S
        ) as learner:
            sampler = learner.sampler(BATCH_ROWS)
            go.send(True)
            sampler.sample(min_committed=SLOT_ROWS, timeout=TIMEOUT_S)
            for tick in range(ticks):
                written = (tick + 2) * SLOT_ROWS
                sampler.expect(written)
                go.send(True)
                for _ in range(STEPS):
                    step()
                    learner.progress()
                start_s = time.perf_counter()
                batch = sampler.sample(min_committed=written, timeout=TIMEOUT_S)
                spent_ms.append((time.perf_counter() - start_s) * 1e3)
                lag_rows.append(written - batch.window[1])
        go.send(False)
        process.join()
    return spent_ms, lag_rows


def collect_on_demand(name: str, run_dir: str, go: Connection, seed: int) -> None:
    """One slot for each True that comes through ``go``."""
    schema = transition_schema()
    rows = rows_of(schema, SLOT_ROWS, seed)
    with Collector.connect(name, schema=schema, lanes=SLOT_ROWS, run_dir=run_dir, timeout=TIMEOUT_S) as collector:
        while go.recv():
            collector.write(rows)


def in_a_process(function: Callable[..., float], *arguments: object) -> float:
    """What ``function`` returns in a fresh process: what ran in this one before has no part in it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def rows_per_s(options: Options, capacity: int, duration_s: float) -> float:
    """Rows a second of one collector, the last commit included."""
    schema = transition_schema()
    rows, written = rows_of(schema, SLOT_ROWS, options.seed), 0
    with (
        serve(options, capacity=capacity, slot_rows=SLOT_ROWS, depth=DEPTH) as server,
        Collector.connect(server.name, schema=schema, lanes=SLOT_ROWS, run_dir=server.run_dir, timeout=TIMEOUT_S) as collector,
    ):
        collector.write(rows)
        collector.flush(timeout=TIMEOUT_S)
        start_s = time.perf_counter()
        while time.perf_counter() - start_s < duration_s:
            collector.write(rows)
            written += SLOT_ROWS
        collector.flush(timeout=TIMEOUT_S)
        return written / (time.perf_counter() - start_s)


def storage_bytes(options: Options, capacity: int) -> tuple[int, int]:
    """Bytes on the host (ring and slots) and on the device, as the server reports them with one collector attached."""
    schema = transition_schema()
    with (
        serve(options, capacity=capacity, slot_rows=SLOT_ROWS, depth=DEPTH) as server,
        Collector.connect(server.name, schema=schema, lanes=SLOT_ROWS, run_dir=server.run_dir, timeout=TIMEOUT_S) as collector,
    ):
        collector.write(rows_of(schema, SLOT_ROWS, options.seed))
        collector.flush(timeout=TIMEOUT_S)
        status = server.status()
        return status["ring"]["host_bytes"] + status["ingress"]["host_bytes"], status["ring"]["device_bytes"]


def make_step(kind: str, device: str) -> Callable[[], None]:
    """One update step of 1 ms: waiting for the device without the interpreter lock, or computing in Python."""
    if kind == "busy":
        return spin
    if device != "cuda":
        return lambda: time.sleep(STEP_S)
    import torch

    def wait_for_gpu() -> None:
        torch.cuda._sleep(GPU_CYCLES_PER_STEP)
        torch.cuda.current_stream().synchronize()

    return wait_for_gpu


def spin() -> None:
    end_s = time.perf_counter() + STEP_S
    while time.perf_counter() < end_s:
        pass


def steady(ticks: list[float]) -> float:
    return statistics.median(ticks[-STEADY_TICKS:])


def short_share(ticks_ms: list[float]) -> float:
    return sum(ms <= LONG_WAIT_MS for ms in ticks_ms) / len(ticks_ms)


PARTS = {"serial": measure_serial, "boundary": measure_boundaries, "insert": measure_insert, "storage": measure_storage}


if __name__ == "__main__":
    main()
