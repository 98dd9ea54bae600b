"""Proves from a trace that a tick's work hides behind the update before it, and that nothing synchronous is left at the boundary.

A collector in its own process adds 512 rows (430 float32) a tick; the learner updates for 4 ms (waiting for the device, or with
``--update busy`` holding the interpreter lock) and then calls sample(), whose batch was requested one tick ahead and must hold the rows
added in that same update: add, copy, commit and gather of tick N + 1 follow one another within update N.

```
learner    |─────────── update N ───────────|b|─────────── update N+1 ─────────|b|     b: boundary, the call of sample()
collector    add N+1                            add N+2
server          copy, commit N+1                   copy, commit N+2
learner                      gather N+1                         gather N+2             in the background
```

The traces of all three processes are merged into OUTPUT/trace_overlap.trace.json, which https://ui.perfetto.dev opens, and every count
is made from that file (``--read FILE`` makes them again). ``--prefetch 0`` is the control that must fail: each gather then lies in a
boundary. The cost of tracing is measured after the ticks.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import benchmark
from bench_ipc import BATCH_ROWS, CAPACITY, DEPTH, SLOT_ROWS, STEPS, TIMEOUT_S, make_step
from benchmark import OURS, Options, Report, rows_of, serve, transition_schema
from overlap import WARM_UP_TICKS, WORK, Overlap, draw
from replay_server_client import Collector, Learner, Trace
from replay_server_protocol.trace import load, merge

NAME = "trace_overlap"
OFF, ON = "trace off", "trace on"


def main() -> None:
    options = benchmark.parse(__doc__, add_options)
    if options.arguments.read is not None:
        print(*Overlap.of(load(options.arguments.read)).lines(), sep="\n")
        return
    report, runs = Report(NAME, options), []
    report.raw |= {"update": options.arguments.update, "prefetch": options.arguments.prefetch}
    options.output.mkdir(parents=True, exist_ok=True)
    merged = options.output / f"{NAME}.trace.json"
    for _ in range(options.runs):
        record_ticks(options, merged)
        runs.append(Overlap.of(load(merged)))
    add_counts(report, runs)
    measure_calls(report)
    measure_places(report)
    report.publish()
    print(f"the last run, in {merged} (open it in https://ui.perfetto.dev):", *runs[-1].lines(), sep="\n  ")
    if importlib.util.find_spec("matplotlib") is not None:
        draw(load(merged), options.output / f"{NAME}_timeline.png")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--update", choices=("waiting", "busy"), default="waiting", help="what an update does (default: waiting)")
    parser.add_argument("--prefetch", type=int, default=1, help="batches requested ahead (default: 1)")
    parser.add_argument("--read", type=Path, metavar="FILE", help="count in an earlier merged trace; run nothing")


def record_ticks(options: Options, merged: Path) -> None:
    """One run: a fresh server, a collector process and this learner, each with a trace, merged into one file."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        server_file, collector_file, learner_file = (Path(folder, f"{who}.json") for who in ("server", "collector", "learner"))
        go, other = context.Pipe()
        with serve(options, capacity=CAPACITY, slot_rows=SLOT_ROWS, depth=DEPTH, trace=server_file) as server:
            arguments = (server.name, server.run_dir, other, options.seed, collector_file)
            process = context.Process(target=collect, args=arguments, daemon=True)
            process.start()
            learn(options, server.name, server.run_dir, go).save(learner_file)
            process.join()
        merge((learner_file, collector_file, server_file), merged)


def learn(options: Options, name: str, run_dir: str, go: Connection) -> Trace:
    """Update N: the collector is told to add the rows of tick N + 1; 4 ms of work. Boundary N: batch N + 1 is taken."""
    is_busy = options.arguments.update == "busy"
    step, trace = make_step(options.arguments.update, options.device), Trace("learner")
    where: dict[str, Any] = {"run_dir": run_dir, "timeout": TIMEOUT_S, "prefetch": options.arguments.prefetch}
    with Learner.connect(name, device=options.device, seed=options.seed, trace=trace, **where) as learner:
        sampler = learner.sampler(BATCH_ROWS)
        go.send(True)
        sampler.sample(min_committed=SLOT_ROWS, timeout=TIMEOUT_S)
        for tick in range(1, WARM_UP_TICKS + options.pick(100, 20)):
            added = (tick + 1) * SLOT_ROWS
            with trace.span("update", tick=tick):
                sampler.expect(added)
                go.send(True)
                for _ in range(STEPS):
                    step()
                    if is_busy:  # a background thread would never get the interpreter lock
                        learner.progress()
            sampler.sample(min_committed=added, timeout=TIMEOUT_S)
    go.send(False)
    return trace


def collect(name: str, run_dir: str, go: Connection, seed: int, file: Path) -> None:
    """One slot for each True that comes through ``go``."""
    schema, trace = transition_schema(), Trace("collector")
    rows = rows_of(schema, SLOT_ROWS, seed)
    with Collector.connect(name, schema=schema, lanes=SLOT_ROWS, run_dir=run_dir, timeout=TIMEOUT_S, trace=trace) as collector:
        while go.recv():
            collector.write(rows)
    trace.save(file)


def add_counts(report: Report, runs: list[Overlap]) -> None:
    """The counts of every run, and what must be so of all of them together."""
    group = "of 100 ticks"
    for kind in WORK:
        shares = [run.percent(run.inside[kind]) for run in runs]
        report.add(group, f"{kind} of N+1 inside update N", OURS, "%", shares)
        report.expect(f"{kind} of N+1 inside update N, % of all ticks", statistics.mean(shares), at_least=99)
    touched = [run.percent(run.touched) for run in runs]
    report.add(group, "boundary touches an add, copy, commit or gather", OURS, "%", touched)
    report.expect("boundary touches an add, copy, commit or gather, % of all ticks", statistics.mean(touched), at_most=1)
    report.add(group, "gather drew from the rows added in that update, too", OURS, "%", [run.percent(run.fresh) for run in runs])
    report.add("boundary", "boundary, median", OURS, "µs", [run.median_us for run in runs])
    report.add("boundary", "boundary, 99th percentile", OURS, "µs", [run.p99_us for run in runs])
    if report.options.device == "cuda":
        report.expect("boundary, median in µs", statistics.median(run.median_us for run in runs), at_most=15)
    report.raw["boundaries in µs"] = [run.boundaries_us for run in runs]


def measure_calls(report: Report) -> None:
    """A write that needs not wait and a sample that is ready, with a trace and without one: two clients of one server, in turns."""
    options, schema, trace = report.options, transition_schema(), Trace("cost")
    calls, rows = options.pick(300, 30), rows_of(schema, SLOT_ROWS, options.seed)
    step = make_step("waiting", options.device)
    writes: dict[str, list[float]] = {OFF: [], ON: []}
    samples: dict[str, list[float]] = {OFF: [], ON: []}
    for _ in range(options.runs):
        with serve(options, capacity=CAPACITY, slot_rows=SLOT_ROWS, depth=DEPTH) as server:
            where: dict[str, Any] = {"run_dir": server.run_dir, "timeout": TIMEOUT_S}
            shape: dict[str, Any] = {"schema": schema, "lanes": SLOT_ROWS, **where}
            with (
                Collector.connect(server.name, name="off", **shape) as off,
                Collector.connect(server.name, name="on", trace=trace, **shape) as on,
            ):
                writes_us = median_us(lambda: off.write(rows), lambda: on.write(rows), lambda: (off.flush(), on.flush()), calls)
            with (
                Learner.connect(server.name, name="off", device=options.device, **where) as plain,
                Learner.connect(server.name, name="on", device=options.device, trace=trace, **where) as traced,
            ):
                takes = (lambda: plain.sample(BATCH_ROWS, timeout=TIMEOUT_S), lambda: traced.sample(BATCH_ROWS, timeout=TIMEOUT_S))
                samples_us = median_us(*takes, lambda: [step() for _ in range(STEPS)], calls)
        for side, write_us, sample_us in zip((OFF, ON), writes_us, samples_us, strict=True):
            writes[side].append(write_us)
            samples[side].append(sample_us)
    for side in (OFF, ON):
        report.add("cost, a call", "write of 512 rows", side, "µs", writes[side])
        report.add("cost, a call", "sample of a ready batch", side, "µs", samples[side])


def measure_places(report: Report) -> None:
    """What stands at each place in the code that may record."""
    trace, off = Trace("cost"), None
    each = 100_000
    sides: dict[str, Callable[[], float]] = {
        OFF: lambda: timeit.timeit("off is not None", globals={"off": off}, number=each) / each * 1e9,
        ON: lambda: timeit.timeit(lambda: trace.record("track", "name", trace.now_ns(), trace.now_ns(), rows=1), number=each) / each * 1e9,
    }
    report.measure("cost, a place that may record", "test for None, or record", "ns", sides)


def median_us(one: Callable[[], object], other: Callable[[], object], between: Callable[[], object], calls: int) -> tuple[float, float]:
    """The median times of two calls that take turns, with ``between`` before each round, not counted."""
    spent_us: tuple[list[float], list[float]] = ([], [])
    for number in range(calls):
        between()
        for call, times in ((one, spent_us[0]), (other, spent_us[1]))[:: 1 if number % 2 else -1]:
            begin_ns = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - begin_ns) / 1e3)
    warm = calls // 10
    return statistics.median(spent_us[0][warm:]), statistics.median(spent_us[1][warm:])


if __name__ == "__main__":
    main()
