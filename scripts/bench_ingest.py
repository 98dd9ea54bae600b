"""How fast collectors fill the ring: by their number and by slot rows, written and merely handed over, beside a bare pinned copy loop.

  write       every collector, a process of its own, writes rows into its slots (checks and moments of the reward on, side columns off)
  hand over   the slots are published as they are: what the transport itself can do
  bare copy   one process, one pinned block, 8 copies of a slot's bytes in flight into device memory: the bus
The rate is what the server committed within the window, bytes of whole rows in memory included (stride).
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event

import benchmark
from benchmark import OURS, Options, Report, rows_of, serve, transition_schema
from replay_server_client import Collector

BARE = "bare copy"
COPIES_IN_FLIGHT = 8
TIMEOUT_S = 30.0


def main() -> None:
    options = benchmark.parse(__doc__)
    report = Report("bench_ingest", options)
    full = [(512, 1, 2), (512, 4, 2), (512, 12, 2), (512, 12, 4), (512, 12, 8), (4096, 1, 2), (4096, 4, 2), (4096, 8, 2)]
    for slot_rows, collectors, depth in options.pick(full, [(512, 1, 2), (512, 2, 4)]):
        rates = gb_per_s(options, collectors, slot_rows, depth=depth, is_refilled=True)
        report.add("written slots", f"write, {collectors} × {slot_rows} rows, depth {depth}", OURS, "GB/s", rates)
    slot_rows, collectors = options.pick((4096, 8), (512, 2))
    what = f"hand over, {collectors} × {slot_rows} rows"
    report.add("slots handed over", what, OURS, "GB/s", gb_per_s(options, collectors, slot_rows, depth=2, is_refilled=False))
    if options.device == "cuda":
        report.add("slots handed over", what, BARE, "GB/s", [bare_gb_per_s(slot_rows) for _ in range(options.runs)])
    if options.device == "cuda" and not options.quick:
        expect(report)
    report.publish()


def expect(report: Report) -> None:
    for what, at_least in (
        ("write, 12 × 512 rows, depth 2", 24.0),
        ("write, 12 × 512 rows, depth 8", 24.0),
        ("write, 8 × 4096 rows, depth 2", 35.0),
    ):
        found = report.find(what)
        if found:
            report.expect(f"{what}, GB/s", found.median, at_least=at_least)
    report.expect_ratio("hand over, 8 × 4096 rows", OURS, BARE, at_least=0.9)


def gb_per_s(
    options: Options, collectors: int, slot_rows: int, *, depth: int, is_refilled: bool, columns: Sequence[str] = ()
) -> list[float]:
    """One rate a run: a second each of one server and its collectors, measured once all of them write; the ring wraps in each."""
    capacity, window_s = options.pick(16 * 4096, 8 * 512), options.pick(1.0, 0.3)
    rates = []
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with serve(options, capacity=capacity, headroom=capacity, slot_rows=slot_rows, depth=depth, columns=tuple(columns)) as server:
        running = [context.Event() for _ in range(collectors)]
        arguments = [
            (server.name, str(server.run_dir), slot_rows, is_refilled, options.seed + n, running[n], stop) for n in range(collectors)
        ]
        processes = [context.Process(target=collect, args=each, daemon=True) for each in arguments]
        for process in processes:
            process.start()
        try:
            for event in running:
                if not event.wait(TIMEOUT_S):
                    raise TimeoutError(f"a collector did not start within {TIMEOUT_S:g} s; its error is above")
            for _ in range(options.runs):
                before, start_s = server.status(), time.perf_counter()
                stop.wait(window_s)
                after, elapsed_s = server.status(), time.perf_counter() - start_s
                rows: int = after["ring"]["committed"] - before["ring"]["committed"]
                rates.append(rows * transition_schema().stride / elapsed_s / 1e9)
        finally:
            stop.set()
            for process in processes:
                process.join(TIMEOUT_S)
    return rates


def collect(name: str, run_dir: str, slot_rows: int, is_refilled: bool, seed: int, running: Event, stop: Event) -> None:
    """Fills, or only hands over, one slot after the other until ``stop``."""
    schema = transition_schema()
    rows = rows_of(schema, slot_rows, seed)
    with Collector.connect(name, schema=schema, lanes=slot_rows, run_dir=run_dir, timeout=TIMEOUT_S) as collector:
        collector.write(rows)
        collector.flush(timeout=TIMEOUT_S)
        running.set()
        while not stop.is_set():
            if is_refilled:
                collector.write(rows)
            else:
                with collector.slot(timeout=TIMEOUT_S) as slot:
                    slot.rows = slot_rows


def bare_gb_per_s(slot_rows: int, duration_s: float = 1.0) -> float:
    """The same bytes from one pinned block, as fast as one process can submit and see them complete."""
    import torch

    n_bytes = slot_rows * transition_schema().stride
    source = torch.zeros(COPIES_IN_FLIGHT, n_bytes, dtype=torch.uint8, pin_memory=True)
    ring = torch.zeros(64, n_bytes, dtype=torch.uint8, device="cuda")
    events = [torch.cuda.Event() for _ in range(COPIES_IN_FLIGHT)]
    torch.cuda.synchronize()
    copies, start_s = 0, time.perf_counter()
    with torch.cuda.stream(torch.cuda.Stream()):
        while time.perf_counter() - start_s < duration_s:
            events[copies % COPIES_IN_FLIGHT].synchronize()
            ring[copies % 64].copy_(source[copies % COPIES_IN_FLIGHT], non_blocking=True)
            events[copies % COPIES_IN_FLIGHT].record()
            copies += 1
        torch.cuda.synchronize()
    return copies * n_bytes / (time.perf_counter() - start_s) / 1e9


if __name__ == "__main__":
    main()
