"""Why a step launched from Python is slower beside full-rate ingest: bench_interference's step, one suspect after the other taken away.

  step                    on a fixed batch, nobody else at work
  step, copies            that beside processes without a server that copy memory at the rate of this run's ingest
  step, ingest            that beside collectors and server, the learner idle
  sample                  with a batch from the learner for each step, no ingest
  sample, ingest          that beside ingest: what bench_interference calls its third condition
  driven                  as sample, but the step's own thread calls progress(): no thread of the learner's asks for the interpreter
  driven, ingest          that beside ingest
  sample, ingest, apart   with the thread again, this process on CPUs of its own: four of them, whole cores where siblings share one
The conditions take turns within each run. With ``--cpus N`` everything runs on N CPUs, so that one machine shows what more of them change.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import benchmark
import numpy as np
from bench_interference import BATCH_ROWS, TIMEOUT_S, at_work, ingesting, make_update, step_ms
from benchmark import OURS, Options, Report, rows_of, serve, transition_schema
from replay_server_client import Batch, Collector, Learner

from replay_server import ReplayServer

STEP, COPIES, INGEST = "step", "step, copies", "step, ingest"
SAMPLE, SAMPLE_INGEST, APART = "sample", "sample, ingest", "sample, ingest, apart"
DRIVEN, DRIVEN_INGEST = "driven", "driven, ingest"
RATE = "GB/s"
OWN_CPUS = 4


def main() -> None:
    options = benchmark.parse(__doc__, extend)
    if options.arguments.cpus:
        os.sched_setaffinity(0, first_cpus(options.arguments.cpus))
    report = Report(f"bench_interference_causes_{len(os.sched_getaffinity(0))}_cpus", options)
    found: dict[str, list[float]] = {}
    for _ in range(options.runs):
        run = run_once(options)
        report.keep(runs=run)
        for what, figure in run.items():
            found.setdefault(what, []).append(figure)
    rates = found.pop(RATE)
    for what, steps_ms in found.items():
        report.add("learner step", what, OURS, "ms", steps_ms)
    report.add("ingest meanwhile", "write, the learner idle", OURS, RATE, rates)
    report.publish()
    for what in found:
        ratios = sorted(mine / alone for mine, alone in zip(found[what], found[STEP], strict=True))
        print(f"{what:26} {ratios[len(ratios) // 2]:.3f} x the step alone ({ratios[0]:.3f} to {ratios[-1]:.3f})")


def extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpus", type=int, default=None, help="CPUs for all processes together (default: all of this process's)")


def run_once(options: Options) -> dict[str, float]:
    """Median milliseconds of a step in each condition, and the rate of ingest."""
    collectors, slot_rows = options.pick((8, 4096) if options.device == "cuda" else (1, 512), (1, 512))
    steps = options.pick(200 if options.device == "cuda" else 60, 10)
    found: dict[str, float] = {}
    with ExitStack() as stack:
        server = stack.enter_context(serve(options, capacity=options.pick(131_072, 5000), slot_rows=slot_rows, depth=2))
        threaded, driven = stack.enter_context(learners(options, server, slot_rows))
        update = make_update(options)

        def look(what: str, step: Callable[[], None]) -> None:
            found[what] = step_ms(options, steps, step)

        def fixed() -> Callable[[], None]:
            return partial(update, threaded.sample(BATCH_ROWS, timeout=TIMEOUT_S))

        look(STEP, fixed())
        look(SAMPLE, sampled(threaded, update))
        look(DRIVEN, stepped(driven, update))
        with ingesting(server, collectors, slot_rows, options.seed):
            with rated(server, found):
                look(INGEST, fixed())
            look(SAMPLE_INGEST, sampled(threaded, update))
            look(DRIVEN_INGEST, stepped(driven, update))
        with copying(collectors, slot_rows, found[RATE] / collectors):
            look(COPIES, fixed())
        own = own_cpus()
        others = os.sched_getaffinity(0) - own
        with kept_to(others, server.pid), ingesting(server, collectors, slot_rows, options.seed), kept_to(own):
            look(APART, sampled(threaded, update))
    return found


@contextmanager
def learners(options: Options, server: ReplayServer, slot_rows: int) -> Iterator[tuple[Learner, Learner]]:
    """One with a thread of its own and one that ``progress()`` drives, of a ring that has rows."""
    where: dict[str, Any] = {"run_dir": server.run_dir, "timeout": TIMEOUT_S}
    with Collector.connect(server.name, schema=(schema := transition_schema()), lanes=slot_rows, name="warm-up", **where) as collector:
        collector.write(rows_of(schema, slot_rows, options.seed))
        collector.flush(timeout=TIMEOUT_S)
    with (
        Learner.connect(server.name, device=options.device, name="threaded", **where) as threaded,
        Learner.connect(server.name, device=options.device, name="driven", **where) as driven,
    ):
        driven.sample(BATCH_ROWS, timeout=TIMEOUT_S)
        driven.progress()  # from here on it has no thread
        yield threaded, driven


def sampled(learner: Learner, update: Callable[[Batch], None]) -> Callable[[], None]:
    return lambda: update(learner.sample(BATCH_ROWS, timeout=TIMEOUT_S))


def stepped(learner: Learner, update: Callable[[Batch], None]) -> Callable[[], None]:
    """Asks for the next batch before the update is launched, and starts its gather once it is."""

    def step() -> None:
        batch = learner.sample(BATCH_ROWS, timeout=TIMEOUT_S)
        learner.progress()
        update(batch)
        learner.progress()

    return step


@contextmanager
def rated(server: ReplayServer, found: dict[str, float]) -> Iterator[None]:
    before, started_s = server.status()["ring"]["committed"], time.perf_counter()
    yield
    rows = server.status()["ring"]["committed"] - before
    found[RATE] = rows * transition_schema().stride / (time.perf_counter() - started_s) / 1e9


def copying(processes: int, slot_rows: int, gb_per_s: float) -> AbstractContextManager[None]:
    """``processes`` that each copy a slot's bytes at ``gb_per_s``."""
    return at_work(copy, [(slot_rows, gb_per_s)] * processes)


def copy(slot_rows: int, gb_per_s: float, running: Event, stop: Event) -> None:
    source = np.ones(slot_rows * transition_schema().stride, np.uint8)
    slots = [np.empty_like(source) for _ in range(2)]
    running.set()
    started_s, done = time.perf_counter(), 0
    while not stop.is_set():
        np.copyto(slots[done % 2], source)
        done += 1
        time.sleep(max(0.0, started_s + done * source.nbytes / (gb_per_s * 1e9) - time.perf_counter()))


@contextmanager
def kept_to(cpus: Iterable[int], *pids: int) -> Iterator[None]:
    """This process, all its threads, and ``pids`` run on ``cpus`` alone inside the block; children started in it stay there."""
    before = os.sched_getaffinity(0)
    keep(cpus, (os.getpid(), *pids))
    try:
        yield
    finally:
        keep(before, (os.getpid(), *pids))


def keep(cpus: Iterable[int], pids: Iterable[int]) -> None:
    chosen = set(cpus)
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setaffinity(int(thread.name), chosen)


def own_cpus() -> set[int]:
    """Four of the CPUs this process may use, or half of fewer, siblings of one core together."""
    allowed = os.sched_getaffinity(0)
    wanted = min(OWN_CPUS, len(allowed) // 2)
    return set(sorted(allowed, key=lambda cpu: (min(siblings(cpu)), cpu))[:wanted])


def first_cpus(count: int) -> set[int]:
    """``count`` of the CPUs this process may use, siblings of one core together."""
    return set(sorted(os.sched_getaffinity(0), key=lambda cpu: (min(siblings(cpu)), cpu))[:count])


def siblings(cpu: int) -> set[int]:
    """The CPUs that share ``cpu``'s core, itself among them."""
    try:
        listed = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text("utf-8").strip()
    except OSError:
        return {cpu}
    found: set[int] = set()
    for part in listed.split(","):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return found


if __name__ == "__main__":
    main()
