"""Mixed load for as long as you like, and whether anything is lost, stuck, torn or leaking: scripts/soak.py --minutes 30 --device auto.

Collectors: one as fast as credits come, one with a row now and then, one with bursts (masks, cuts, part-filled slots, several lanes) that
leaves and comes back. Learners: uniform (and posting to the mailbox), prioritized, n-step and sequences. Two guests, a collector and a
learner, are killed with -9 or stopped for 1.5 s at random times and replaced. Every field of every sampled row is checked against its
producer, lane and step; sequences must be consecutive; the server's sums must add up at every look.

Every few seconds: private memory (RSS without shared pages), descriptors and threads of the server and of the clients that stay, segments,
device memory, p50 and p99 of ``write`` and ``sample``, rates. Drift is the median slope of all pairs of looks after the warm-up. Writes
soak.json, soak.txt and soak.png to ``--output``; the exit status is 1 if a row was wrong, a sum didn't add up, a client got stuck, anything
was left behind or a gauge leaks.
"""

from __future__ import annotations

import argparse
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import benchmark
import numpy as np
from benchmark import Options, serve
from soaking.crew import Crew
from soaking.gauges import Gauges
from soaking.place import Place
from soaking.record import PARTS, SoakReport, describe, rounded

from replay_server import ReplayServer

ATTACH_WITHIN_S, REST_WITHIN_S = 120.0, 15.0
SERVER = {"slot_rows": 128, "depth": 2, "columns": "link,priority", "moments": "reward"}
LEARNERS = {"uniform": "learn_uniform", "prioritized": "learn_by_priority", "lanes": "learn_along_lanes"}


def main() -> None:
    options = benchmark.parse(__doc__, add_options)
    minutes = options.arguments.minutes
    if minutes is None:
        minutes = options.pick(30.0, 0.1)
    options = replace(options, runs=PARTS)
    report = SoakReport("soak", options)
    capacity = options.pick(1_000_000 if options.device == "cuda" else 50_000, 4000)
    with serve(options, capacity=capacity, **SERVER) as server:
        gauges, crew = soak(server, options, 60 * minutes)
        if not gauges.is_server_lost:
            at_rest(server, gauges)
    left = gauges.segments_left()
    if left:
        gauges.faults.append(f"left behind: {left}")
    tell(report, gauges, crew)
    if gauges.faults or not all(target.is_met for target in report.targets):
        raise SystemExit("the soak found faults")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=None, help="how long the clients run (default: 30, with --quick 0.1)")
    parser.add_argument("--pace", type=float, default=None, help="the fast collector's pause after each write, s (default: 0, cpu 0.003)")


def soak(server: ReplayServer, options: Options, duration_s: float) -> tuple[Gauges, Crew]:
    """Runs the crew for ``duration_s`` from the moment that all are attached, SIGTERM ends it sooner; a look every few seconds."""
    is_gpu = options.device == "cuda"
    pace_s = options.arguments.pace if options.arguments.pace is not None else (0.0 if is_gpu else 0.003)
    place = Place(server.name, server.run_dir, options.device, options.seed, pace_s, 0.001 if is_gpu else 0.02)
    look_every_s = min(5.0, duration_s / 20)
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with Crew(place, np.random.default_rng(options.seed), guest_lives_s=min(15.0, duration_s / 2)) as crew:
        crew.start(options.pick(LEARNERS, {"learner": "learn_in_every_way"}))
        wait_for_all(server, crew)
        gauges = Gauges(server, crew, is_gpu)
        look_at_s = look_every_s
        while gauges.elapsed_s < duration_s and not (over.is_set() or gauges.is_server_lost):
            crew.tend()
            gauges.take(crew.news())
            if gauges.elapsed_s >= look_at_s:
                gauges.look()
                look_at_s = gauges.elapsed_s + look_every_s
            time.sleep(0.05)
        gauges.take(crew.end())
        gauges.faults += crew.faults
    return gauges, crew


def wait_for_all(server: ReplayServer, crew: Crew) -> None:
    """Importing torch takes its time on a busy machine."""
    end_s = time.monotonic() + ATTACH_WITHIN_S
    who = {member.who for member in crew.residents}
    while True:
        report = server.status(timeout=30)
        here = {session["name"].partition("-")[0] for session in (*report["collectors"], *report["learners"])}
        if who <= here and (report["ring"] or {}).get("committed"):
            return
        if time.monotonic() > end_s or not all(member.process.is_alive() for member in crew.members):
            told = "\n".join(fault for _, news in crew.news() for fault in news.faults)
            raise SystemExit(f"not attached within {ATTACH_WITHIN_S:g} s: {sorted(who - here)}\n{told}")
        time.sleep(0.1)


def at_rest(server: ReplayServer, gauges: Gauges) -> None:
    """With every client gone nothing may be held for one: no session, lease, slot, request or segment but the ring's."""
    end_s = time.monotonic() + REST_WITHIN_S
    while True:
        report = gauges.last_report = server.status(timeout=30)
        counters, ingress = report["counters"], report["ingress"]
        held = {
            "sessions": len(report["collectors"]) + len(report["learners"]),
            "rows in flight": counters["rows_in_flight"],
            "slots": ingress["occupied_slots"],
            "slot segments": ingress["segments"],
        }
        if not any(held.values()):
            break
        if time.monotonic() > end_s:
            gauges.faults.append(f"{REST_WITHIN_S:g} s after the last client left the server holds {held}")
            break
        time.sleep(0.1)


def tell(report: SoakReport, gauges: Gauges, crew: Crew) -> None:
    counters = gauges.last_report["counters"]
    drifts = report.add_gauges(gauges)
    report.expect("faults found (rows, sums, stuck clients, leftovers)", len(gauges.faults), at_most=0)
    report.expect("rows judged", gauges.totals["rows (sample)"], at_least=1)
    report.raw |= {
        "faults": gauges.faults,
        "totals": {**gauges.totals, "guests killed": crew.kills, "guests stopped": crew.stops},
        "drift": {drift.gauge: {"median": drift.median, "an hour": drift.per_hour, "rise": drift.rise} for drift in drifts},
        "counters at the end": counters,
        "looks": {name: rounded(values) for name, values in gauges.looks.items()},
        "settings": SERVER,
    }
    report.notes = [describe(drifts), _totals(report.raw["totals"], counters), *gauges.faults[:20]]
    report.publish()


def _totals(totals: dict[str, Any], counters: dict[str, int]) -> str:
    kept = ("leases_revoked", "batches_granted", "batches_dropped", "sessions_opened", "sessions_lost", "stale_messages", "rows_committed")
    told = [f"{name}: {value:,}" for name, value in totals.items()] + [f"{name}: {counters[name]:,}" for name in kept]
    return "; ".join(told)


if __name__ == "__main__":
    main()
