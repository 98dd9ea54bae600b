"""Proves from a trace that a tick's work hides behind the update before it, and that nothing synchronous is left at the boundary.

A collector in its own process adds 512 rows (430 float32) a tick; the learner updates for 4 ms (waiting for the device, or with
``--update busy`` holding the interpreter lock) and then calls sample(), whose batch was requested one tick ahead.

```
learner    |─────────── update N ───────────|b|─────────── update N+1 ─────────|b|     b: boundary, the call of sample()
collector    add N+1                            add N+2
server          copy, commit N+1                   copy, commit N+2
learner     gather N+1                         gather N+2                              in the background
```

The traces of all three processes are merged into OUTPUT/trace_overlap.trace.json, which https://ui.perfetto.dev opens, and every figure is
counted from that file. A tick without a span of its own counts as outside. ``--read FILE`` counts a file again. A few ticks are drawn.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import statistics
import tempfile
import timeit
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import benchmark
import numpy as np
from bench_ipc import BATCH_ROWS, CAPACITY, DEPTH, SLOT_ROWS, STEPS, TIMEOUT_S, make_step
from benchmark import OURS, Options, Report, rows_of, serve, transition_schema
from replay_server_client import Collector, Learner, Trace
from replay_server_protocol.trace import Event, load, merge

NAME = "trace_overlap"
WARM_UP_TICKS, DRAWN_TICKS = 20, 3
WORK = ("add", "copy", "commit", "gather")
OFF, ON = "trace off", "trace on"


def main() -> None:
    options = benchmark.parse(__doc__, add_options)
    if options.arguments.read is not None:
        found = Overlap.of(load(options.arguments.read))
        print("\n".join(found.lines()))
        return
    report = Report(NAME, options)
    options.output.mkdir(parents=True, exist_ok=True)
    merged = options.output / f"{NAME}.trace.json"
    runs = []
    for _ in range(options.runs):
        record_ticks(options, merged)
        runs.append(Overlap.of(load(merged)))
    tell(report, runs)
    measure_cost(report)
    report.publish()
    print(f"the last run, in {merged} (open it in https://ui.perfetto.dev):", *runs[-1].lines(), sep="\n  ")
    if importlib.util.find_spec("matplotlib") is not None:
        draw(load(merged), options.output / f"{NAME}_timeline.png")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--update", choices=("waiting", "busy"), default="waiting", help="what an update does (default: waiting)")
    parser.add_argument("--read", type=Path, metavar="FILE", help="count an earlier merged trace; run nothing")


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
    """Update N: tell the collector to add the rows of tick N + 1, work for 4 ms. Boundary N: take batch N + 1."""
    is_busy = options.arguments.update == "busy"
    step, trace = make_step(options.arguments.update, options.device), Trace("learner")
    with Learner.connect(name, device=options.device, seed=options.seed, run_dir=run_dir, timeout=TIMEOUT_S, trace=trace) as learner:
        go.send(True)
        learner.sample(BATCH_ROWS, min_committed=SLOT_ROWS, timeout=TIMEOUT_S)
        for tick in range(1, WARM_UP_TICKS + options.pick(100, 20)):
            with trace.span("update", tick=tick):
                go.send(True)
                for _ in range(STEPS):
                    step()
                    if is_busy:  # a background thread would never get the interpreter lock
                        learner.progress()
            learner.sample(BATCH_ROWS, timeout=TIMEOUT_S)
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


@dataclass(frozen=True)
class Overlap:
    """What a merged trace shows of the ticks after the warm-up. ``inside``: spans of tick N + 1 that lie inside update N, by kind of work."""

    ticks: int
    inside: dict[str, int]
    boundaries_us: list[float]
    touched: int
    """Boundaries during which any add, copy, commit or gather was under way."""
    fresh: int
    """Gathers whose window already held the rows added in the same update."""

    @classmethod
    def of(cls, events: list[Event]) -> Overlap:
        updates = {event["args"]["tick"]: event for event in spans(events, "update") if event["args"]["tick"] >= WARM_UP_TICKS}
        if not updates:
            raise SystemExit("there is no update after the warm-up in this trace")
        boundaries = [event for event in spans(events, "boundary") if event["args"]["number"] - 1 in updates]
        work = by_tick(events)
        everything = [event for kind in work.values() for event in kind.values()]
        return cls(
            ticks=len(updates),
            inside={kind: sum(is_inside(found.get(tick), update) for tick, update in updates.items()) for kind, found in work.items()},
            boundaries_us=[event["dur"] for event in boundaries],
            touched=sum(any(overlap(event, boundary) for event in everything) for boundary in boundaries),
            fresh=sum(tick in work["gather"] and work["gather"][tick]["args"]["committed"] >= (tick + 1) * SLOT_ROWS for tick in updates),
        )

    @property
    def median_us(self) -> float:
        return statistics.median(self.boundaries_us)

    @property
    def p99_us(self) -> float:
        return float(np.percentile(self.boundaries_us, 99))

    def lines(self) -> list[str]:
        share = [
            f"{kind} of tick N+1 inside update N: {n} of {self.ticks} ({100 * n / self.ticks:.1f} %)" for kind, n in self.inside.items()
        ]
        return [
            *share,
            f"boundaries during which an add, copy, commit or gather was under way: {self.touched} of {len(self.boundaries_us)}",
            f"boundary: median {self.median_us:.1f} us, p99 {self.p99_us:.1f} us, longest {max(self.boundaries_us):.1f} us",
            f"gathers that drew from the rows of the same update's add, too: {self.fresh} of {self.ticks}",
        ]


def by_tick(events: list[Event]) -> dict[str, dict[int, Event]]:
    """The work of tick N + 1, by kind, under N: the update that it should lie in. Slots are one a tick, so seqs tell ticks."""
    return {
        "add": dict(enumerate(spans(events, "write"))),
        "copy": {event["args"]["first_seq"] // SLOT_ROWS: event for event in spans(events, "copy")},
        "commit": {event["args"]["committed"] // SLOT_ROWS - 1: event for event in spans(events, "commit")},
        "gather": {event["args"]["number"] - 1: event for event in spans(events, "gather")},
    }


def spans(events: list[Event], name: str) -> list[Event]:
    return sorted((event for event in events if event["ph"] == "X" and event["name"] == name), key=lambda event: event["ts"])


def end_us(event: Event) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def is_inside(event: Event | None, window: Event) -> bool:
    return event is not None and window["ts"] <= event["ts"] and end_us(event) <= end_us(window)


def overlap(one: Event, other: Event) -> bool:
    return bool(one["ts"] < end_us(other) and other["ts"] < end_us(one))


def tell(report: Report, runs: list[Overlap]) -> None:
    """The figures of every run, and what must be so in all of them together."""
    for kind in WORK:
        shares = [100 * run.inside[kind] / run.ticks for run in runs]
        report.add("of tick N+1 inside update N", kind, OURS, "%", shares)
        report.expect(f"{kind} of tick N+1 inside update N, % of all runs", statistics.mean(shares), at_least=99)
    touched = [100 * run.touched / len(run.boundaries_us) for run in runs]
    report.add("of tick N+1 inside update N", "boundary touched by an add, copy, commit or gather", OURS, "%", touched)
    report.expect("boundaries touched by an add, copy, commit or gather, % of all runs", statistics.mean(touched), at_most=1)
    report.add(
        "of tick N+1 inside update N",
        "gather drew from the same update's add, too",
        OURS,
        "%",
        [100 * run.fresh / run.ticks for run in runs],
    )
    report.add("boundary", "boundary, median", OURS, "µs", [run.median_us for run in runs])
    report.add("boundary", "boundary, 99th percentile", OURS, "µs", [run.p99_us for run in runs])
    if report.options.device == "cuda":
        report.expect("boundary, median in µs", statistics.median(run.median_us for run in runs), at_most=15)
    report.raw["boundaries in µs"] = [run.boundaries_us for run in runs]


def measure_cost(report: Report) -> None:
    """What a trace costs: a write (never waiting) and a prefetched sample with and without one, and the parts of the difference."""
    options, schema = report.options, transition_schema()
    rows, trace, nothing = rows_of(schema, SLOT_ROWS, options.seed), Trace("cost"), None
    calls: int = options.pick(300, 30)
    with serve(options, capacity=CAPACITY, slot_rows=SLOT_ROWS, depth=DEPTH) as server:
        where: dict[str, Any] = {"run_dir": server.run_dir, "timeout": TIMEOUT_S}

        def write_us(side: Trace | None) -> float:
            with Collector.connect(server.name, schema=schema, lanes=SLOT_ROWS, trace=side, **where) as collector:
                return median_us(lambda: collector.write(rows), calls, lambda: collector.flush(TIMEOUT_S))

        def sample_us(side: Trace | None) -> float:
            with Learner.connect(server.name, device=options.device, trace=side, **where) as learner:
                step = make_step("waiting", options.device)
                return median_us(lambda: learner.sample(BATCH_ROWS, timeout=TIMEOUT_S), calls, step)

        report.measure("cost, a call", "write of 512 rows", "µs", {OFF: lambda: write_us(None), ON: lambda: write_us(trace)})
        report.measure("cost, a call", "sample, prefetched", "µs", {OFF: lambda: sample_us(None), ON: lambda: sample_us(trace)})
    each = 100_000
    test = "nothing is not None"
    parts: dict[str, Callable[[], float]] = {
        OFF: lambda: timeit.timeit(test, globals={"nothing": nothing}, number=each) / each * 1e9,
        ON: lambda: timeit.timeit(lambda: trace.record("track", "name", trace.now_ns(), trace.now_ns(), rows=1), number=each) / each * 1e9,
    }
    report.measure("cost, a place in the code that may record", "test for None, or record a span", "ns", parts)


def median_us(call: Callable[[], object], calls: int, between: Callable[[], object]) -> float:
    """The median time of ``call``, with ``between`` after each, not counted."""
    spent = []
    for _ in range(calls):
        spent.append(timeit.timeit(call, number=1) * 1e6)
        between()
    return statistics.median(spent[calls // 10 :])


def draw(events: list[Event], path: Path) -> None:
    """A few ticks from the middle of the trace; what belongs to tick N + 1 has the colour of update N, which it should lie under."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    updates, work = spans(events, "update"), by_tick(events)
    shown = updates[len(updates) // 2 :][:DRAWN_TICKS]
    origin_us = shown[0]["ts"] - 200
    figure, axis = pyplot.subplots(figsize=(11, 3.2), layout="constrained")

    def bar(event: Event, line: int, color: str) -> None:
        axis.broken_barh([((event["ts"] - origin_us) / 1e3, event["dur"] / 1e3)], (line - 0.35, 0.7), color=color, linewidth=1)

    boundaries = spans(events, "boundary")
    starts = [event["ts"] for event in boundaries]
    for update in shown:
        tick = update["args"]["tick"]
        color = ("tab:blue", "tab:orange", "tab:green")[tick % 3]
        bar(update, 0, color)
        axis.text((update["ts"] + update["dur"] / 2 - origin_us) / 1e3, 0, f"update {tick}", ha="center", va="center", color="white")
        bar(boundaries[min(bisect_left(starts, end_us(update)), len(boundaries) - 1)], 1, "black")
        for line, kind in enumerate(WORK, 2):
            if tick in work[kind]:
                event = work[kind][tick]
                bar(event, line, color)
                axis.text(
                    (end_us(event) - origin_us) / 1e3 + 0.03, line, f"{kind} {tick + 1}: {event['dur']:,.0f} µs", va="center", fontsize=8
                )
    lines = ("learner: update", "learner: boundary", "collector: add", "server: copy", "server: commit", "learner: gather")
    axis.set_yticks(range(len(lines)), lines)
    axis.invert_yaxis()
    axis.set(xlabel="ms", xlim=(0, (end_us(shown[-1]) - origin_us + 200) / 1e3))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
