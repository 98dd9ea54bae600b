"""A million malformed messages at a living server, on both sockets, while a collector writes and a learner samples beside them.

Spoilt real messages, nearly valid ones, nonsense, wrong frames, frames of 4 and 5 MiB: from strangers and from sessions of every role. At
the end the server must still serve, with as many descriptors and threads as at rest and no more memory than after the first tenth; what
is malformed must have been counted; the collector's rows must all be committed, and every row that the learner saw be whole.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import benchmark
from benchmark import OURS, Report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.barrage import OPTIONS, Barrage, Weight, rounds, settle, witness_collector, witness_learner
from support.processes import Children
from support.reports import assert_conserved, wait_report
from support.servers import spawn_server

MOST_GROWTH_BYTES = 16 << 20
SETTLE_WITHIN_S, FOR_EVER_S = 30.0, 7200.0
PAUSE_S = 0.02


def main() -> None:
    options = benchmark.parse(__doc__, add_options)
    options = replace(options, device="cpu", runs=1)
    report = Report("fuzz", options)
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as run_dir, Children(FOR_EVER_S) as children:
        bombard(report, Path(run_dir), children, options.arguments.messages)
    report.publish()
    if not all(target.is_met for target in report.targets):
        raise SystemExit("the server did not stand it")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--messages", type=int, default=100_000, help="how many (default: 100,000)")


def bombard(report: Report, run_dir: Path, children: Children, messages: int) -> None:
    server, stop = spawn_server(children, run_dir / "run", *OPTIONS), run_dir / "stop"
    collector = children.run(witness_collector, server.name, str(server.run_dir), str(stop), PAUSE_S)
    learner = children.run(witness_learner, server.name, str(server.run_dir), str(stop), PAUSE_S)
    learner.wait_for("sampling")
    resting, barrage, begin_s = Weight.of(server.pid), Barrage(server.endpoints, report.options.seed), time.monotonic()
    warm, weights = resting, []
    for n in rounds(messages):
        barrage.fire(n)
        weights.append(Weight.of(server.pid))
        print(f"{barrage.sent:,} sent, {weights[-1].rss_bytes >> 20} MiB", flush=True)
        if barrage.sent <= max(messages // 10, n):
            warm = weights[-1]
    took_s = time.monotonic() - begin_s
    after = settle(server.pid, resting, SETTLE_WITHIN_S)
    found = wait_report(server, lambda found: found["counters"]["bad_messages"] >= barrage.malformed)
    served = wait_report(server, lambda later: later["ring"]["committed"] > found["ring"]["committed"])
    stop.touch()
    wrote, saw = collector.result(), learner.result()
    at_rest = wait_report(server, lambda later: not later["collectors"] and later["counters"]["rows_in_flight"] == 0)
    assert_conserved(at_rest)
    exit_code = server.stop()
    report.add("barrage", "messages sent", OURS, "messages", [barrage.sent])
    report.add("barrage", "of them malformed", OURS, "messages", [barrage.malformed])
    report.add("barrage", "messages a second", OURS, "1/s", [barrage.sent / took_s])
    report.add("beside it", "rows the collector wrote", OURS, "rows", [wrote["written"]])
    report.add("beside it", "its slowest write of 100 rows", OURS, "ms", [1e3 * wrote["slowest_s"]])
    report.add("beside it", "rows the learner judged", OURS, "rows", [saw["rows"]])
    report.add("beside it", "its slowest sample of 64 rows", OURS, "ms", [1e3 * saw["slowest_s"]])
    report.expect("bad messages counted / malformed ones sent", found["counters"]["bad_messages"] / barrage.malformed, at_least=1)
    report.expect("rows of the collector not committed", wrote["written"] - wrote["committed"], at_most=0)
    report.expect("torn or stale rows in the learner's batches", saw["broken"], at_most=0)
    report.expect("growth since the first tenth, MiB", (after.rss_bytes - warm.rss_bytes) / 2**20, at_most=MOST_GROWTH_BYTES >> 20)
    report.expect("descriptors above those at rest", after.descriptors - resting.descriptors, at_most=0)
    report.expect("threads above those at rest", after.threads - resting.threads, at_most=0)
    report.expect("exit code", exit_code, at_most=0)
    report.raw = {
        "weights": [asdict(weight) for weight in (resting, *weights, after)],
        "counters": served["counters"],
        "server_output": server.child.output[-4000:],
    }


if __name__ == "__main__":
    main()
