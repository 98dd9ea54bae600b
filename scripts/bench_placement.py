"""How fast each CPU of this machine is just now, and what a write makes of that.

A virtual machine's CPU is often half a core. Whoever is at work on the other half, a neighbour that nobody here sees or a process of one's
own, slows it; neither top nor load tells. So each run goes over all CPUs, one after the other:
  job      a loop of plain Python, best of 3: once before and once after the writes
  write    a collector in this thread writes slots of 512 rows for 0.1 s; the server goes where the system puts it
A CPU counts as slow where both jobs took more than 1.4 times as long as the fastest one of all; where they disagree it counts as neither.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import benchmark
from benchmark import OURS, Options, Report, rows_of, serve, transition_schema
from replay_server_client import Collector

MACHINE = "this machine"
SLOT_ROWS = 512
LOOPS = 40_000
SLOW = 1.4
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Visit:
    """One CPU in one run: milliseconds of the jobs, microseconds of a write."""

    run: int
    cpu: int
    before_ms: float
    after_ms: float
    write_us: float

    def is_slow(self, fastest_ms: float) -> bool | None:
        """None where it changed meanwhile."""
        before, after = (ms > SLOW * fastest_ms for ms in (self.before_ms, self.after_ms))
        return before if before == after else None


def main() -> None:
    options = benchmark.parse(__doc__)
    report = Report("bench_placement", options)
    visits = visit_all(options)
    report.raw["visits"] = [asdict(visit) for visit in visits]
    summarize(report, visits)
    report.publish()


def summarize(report: Report, visits: Sequence[Visit]) -> None:
    fastest_ms = min(min(visit.before_ms, visit.after_ms) for visit in visits)
    runs = [[visit for visit in visits if visit.run == run] for run in range(report.options.runs)]
    shares = [100 * sum(visit.is_slow(fastest_ms) is True for visit in run) / len(run) for run in runs]
    report.add("CPUs", "slow CPUs", MACHINE, "%", shares)
    for is_slow, name in ((False, "fast"), (True, "slow")):
        found = [[visit for visit in run if visit.is_slow(fastest_ms) is is_slow] for run in runs]
        found = [run for run in found if run]  # all CPUs may be of one kind
        if found:
            report.add(
                "a loop of Python", f"job, {name} CPUs", MACHINE, "ms", [statistics.median(v.after_ms for v in run) for run in found]
            )
            report.add("a write", f"write, {name} CPUs", OURS, "µs", [statistics.median(v.write_us for v in run) for run in found])


def visit_all(options: Options) -> list[Visit]:
    schema = transition_schema()
    rows = rows_of(schema, SLOT_ROWS, options.seed)
    everywhere = os.sched_getaffinity(0)
    visits = []
    with (
        serve(options, capacity=16 * 4096, slot_rows=SLOT_ROWS, depth=2) as server,
        Collector.connect(server.name, schema=schema, lanes=SLOT_ROWS, run_dir=server.run_dir, timeout=TIMEOUT_S) as collector,
    ):
        for run in range(options.runs):
            for cpu in sorted(everywhere):
                os.sched_setaffinity(0, {cpu})  # this thread alone: the collector's others go where they like
                before_ms = job_ms()
                spent_s, end_s = list[float](), time.perf_counter() + options.pick(0.1, 0.02)
                while (start_s := time.perf_counter()) < end_s:
                    collector.write(rows)
                    spent_s.append(time.perf_counter() - start_s)
                visits.append(Visit(run, cpu, before_ms, job_ms(), statistics.median(spent_s) * 1e6))
        os.sched_setaffinity(0, everywhere)
    return visits


def job_ms() -> float:
    """The best of three: an interrupt counts once at most."""
    return min(_loop_ms() for _ in range(3))


def _loop_ms() -> float:
    start_s, total = time.perf_counter(), 0
    for n in range(LOOPS):
        total += n * n % 7
    return (time.perf_counter() - start_s) * 1e3


if __name__ == "__main__":
    main()
