"""Samples per insert over minutes: collectors with bursts and pauses, two learners, one of each coming and going, on a real server.

Ten times a second the status report is asked for |sampled - ratio x inserted|; it must stay within the tolerance and one batch per learner.
At the end, when every client has said bye, the rows that count as sampled must be those that learners had in their hands: not one that
was prefetched and dropped. The collectors and learners are processes of their own; the rates are low, the machine may have other work.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from typing import Any

import benchmark
import numpy as np
from benchmark import OURS, Options, Report, serve
from replay_server_client import Collector, Learner, ReplayTimeout, Schema

from replay_server import ReplayServer

RATIO, BATCH_ROWS, SLOT_ROWS, TOLERANCE, LEARNING_STARTS = 4.0, 256, 64, 512, 1000
COLLECTORS, LEARNERS, WRITE_ROWS, PARTS = 3, 2, 16, 10
LOOK_EVERY_S, ATTACH_WITHIN_S, STOP_WITHIN_S, PATIENCE_S, FOR_EVER_S, LEASE_S = 0.1, 90.0, 30.0, 1.0, 1e9, 0.5
MOST_ERROR = TOLERANCE + LEARNERS * BATCH_ROWS
SCHEMA = Schema.of(obs=("float32", 16), reward="float32")


@dataclass(frozen=True)
class Look:
    """One look at the server."""

    at_s: float
    inserted: int
    sampled: int

    @property
    def error(self) -> float:
        """sampled - ratio x inserted, in rows."""
        return self.sampled - RATIO * self.inserted


def main() -> None:
    options = benchmark.parse(__doc__, add_options)
    options = replace(options, device="cpu", runs=PARTS)
    report = Report("check_flow", options)
    duration_s = 60 * options.arguments.minutes
    settings = {"capacity": 50_000, "slot_rows": SLOT_ROWS, "samples_per_insert": RATIO, "tolerance": TOLERANCE, "lease": LEASE_S}
    with serve(options, **settings, learning_starts=LEARNING_STARTS) as server:
        looks, handed_out = watch(server, options, duration_s)
        at_rest = wait_for_rest(server)
    tell(report, looks, handed_out, at_rest)
    report.publish()
    if not all(target.is_met for target in report.targets):
        raise SystemExit("flow control left its band")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the clients run (default: 10)")


def watch(server: ReplayServer, options: Options, duration_s: float) -> tuple[list[Look], int]:
    """Runs the clients and looks at the server meanwhile; returns the looks and the rows that learners had in their hands."""
    spawning = multiprocessing.get_context("spawn")
    stop, results = spawning.Event(), spawning.Queue()
    roles = [(collect, n) for n in range(COLLECTORS)] + [(learn, n) for n in range(LEARNERS)]
    children = [
        spawning.Process(target=role, args=(server.name, server.run_dir, n, options.seed, stop, results), daemon=True) for role, n in roles
    ]
    for child in children:
        child.start()
    try:
        looks = look(server, children, duration_s)
        stop.set()
        found = [results.get(timeout=STOP_WITHIN_S) for _ in children]
        for child in children:
            child.join(STOP_WITHIN_S)
    except queue.Empty:
        raise SystemExit(f"a client did not end within {STOP_WITHIN_S:g} s") from None
    finally:
        for child in children:
            child.kill()
    return looks, sum(found)


def look(server: ReplayServer, children: list[BaseProcess], duration_s: float) -> list[Look]:
    """Ten looks a second, from the moment all clients are attached: importing torch takes its time on a busy machine."""
    wait_for(server, lambda report: len(report["collectors"]) == COLLECTORS and len(report["learners"]) == LEARNERS)
    looks, start_s = [], time.monotonic()
    while (at_s := time.monotonic() - start_s) < duration_s:
        flow = server.status()["flow"]
        looks.append(Look(at_s, flow["inserted_rows"], flow["sampled_rows"]))
        if not all(child.is_alive() for child in children):
            raise SystemExit("a client ended before its time")
        time.sleep(max(0.0, start_s + len(looks) * LOOK_EVERY_S - time.monotonic()))
    return looks


def wait_for(server: ReplayServer, holds: Callable[[dict[str, Any]], bool]) -> None:
    end_s = time.monotonic() + ATTACH_WITHIN_S
    while not holds(server.status()):
        if time.monotonic() > end_s:
            raise SystemExit(f"clients did not attach or detach within {ATTACH_WITHIN_S:g} s")
        time.sleep(LOOK_EVERY_S)


def wait_for_rest(server: ReplayServer) -> dict[str, Any]:
    """The report once no client is attached and no lease is open: those of a learner that said bye end by their deadlines."""
    wait_for(server, lambda report: not report["collectors"] and not report["learners"])
    time.sleep(2 * LEASE_S)
    return server.status()


def collect(name: str, run_dir: str, n: int, seed: int, stop: Any, results: Any) -> None:
    """Bursts of rows and pauses; collector 0 says bye and comes back now and then. Counts nothing for the learners' sum."""
    dice = np.random.default_rng((seed, 0, n))
    rows = {"obs": np.zeros((WRITE_ROWS, 16), np.float32), "reward": np.zeros(WRITE_ROWS, np.float32)}
    while not stop.is_set():
        collector = Collector.connect(name, schema=SCHEMA, run_dir=run_dir, name=f"collector-{n}")
        leaves_s = time.monotonic() + (dice.uniform(2, 8) if n == 0 else FOR_EVER_S)
        while not stop.is_set() and time.monotonic() < leaves_s:
            for _ in range(dice.integers(1, 60)):
                with contextlib.suppress(ReplayTimeout):
                    collector.write(rows, timeout=PATIENCE_S)
                if stop.is_set():
                    break
            stop.wait(dice.choice((0.0, 0.05, 0.5, dice.uniform(0, 3))))
        with contextlib.suppress(ReplayTimeout):  # the limiter holds its last slot, which goes in later
            collector.close()
    results.put(0)


def learn(name: str, run_dir: str, n: int, seed: int, stop: Any, results: Any) -> None:
    """Batches and updates of all lengths; learner 0 says bye and comes back, learner 1 wants fresh rows now and then."""
    dice = np.random.default_rng((seed, 1, n))
    handed_out = 0
    while not stop.is_set():
        with Learner.connect(name, run_dir=run_dir, device="cpu", name=f"learner-{n}", seed=seed) as learner:
            leaves_s = time.monotonic() + (dice.uniform(2, 8) if n == 0 else FOR_EVER_S)
            newest = 0
            while not stop.is_set() and time.monotonic() < leaves_s:
                wanted = newest + SLOT_ROWS if n == 1 and dice.random() < 0.2 else 0
                with contextlib.suppress(ReplayTimeout):
                    newest = learner.sample(BATCH_ROWS, min_committed=wanted, timeout=PATIENCE_S).window[1]
                    handed_out += BATCH_ROWS
                stop.wait(dice.choice((0.0, 0.002, 0.02, dice.uniform(0, 0.05))) if dice.random() < 0.99 else dice.uniform(1, 4))
    results.put(handed_out)


def tell(report: Report, looks: list[Look], handed_out: int, at_rest: dict[str, Any]) -> None:
    """Figures by tenths of the time, the targets, and what the server said at the end."""
    parts = [part for part in np.array_split(np.arange(len(looks)), PARTS) if len(part)]
    worst = [max(abs(looks[i].error) for i in part) for part in parts]
    report.add("distance from the ratio", "largest |sampled - ratio x inserted|", OURS, "rows", worst)
    report.add("distance from the ratio", "tolerance + a batch per learner", "limit", "rows", [MOST_ERROR])
    for what in ("inserted", "sampled"):
        rows = [getattr(looks[part[-1]], what) - getattr(looks[part[0]], what) for part in parts]
        report.add("rows a tenth of the time", what, OURS, "rows", rows)
    flow, counters = at_rest["flow"], at_rest["counters"]
    for state, seconds in flow["time_in_state_s"].items():
        if seconds:
            report.add("time in each state", state, OURS, "s", [seconds])
    report.expect("largest |sampled - ratio x inserted|, rows", max(worst), at_most=MOST_ERROR)
    report.expect("rows counted as sampled beside rows handed out", abs(flow["sampled_rows"] - handed_out), at_most=0)
    report.expect("rows handed out", handed_out, at_least=BATCH_ROWS)
    report.expect(
        "times in all states beside the server's age, s", abs(sum(flow["time_in_state_s"].values()) - at_rest["uptime_s"]), at_most=1
    )
    report.raw |= {
        "looks": len(looks),
        "worst error of each second": [
            max((x.error for x in looks if int(x.at_s) == s), key=abs) for s in sorted({int(x.at_s) for x in looks})
        ],
        "rows handed out": handed_out,
        "flow at the end": flow,
        "counters at the end": counters,
        "settings": {"ratio": RATIO, "batch_rows": BATCH_ROWS, "slot_rows": SLOT_ROWS, "tolerance": TOLERANCE, "learners": LEARNERS},
    }


if __name__ == "__main__":
    main()
