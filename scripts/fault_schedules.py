"""Plays seeded schedules of faults and records what became of them: the thousand behind tests/fault/test_schedules.py, with figures.

Writes fault_schedules.txt and fault_schedules.json to ``--output``: seeds, result, waits (p50, p99, longest, by call), times until credits
and leases were back, the dead buried, everybody gone on after a restart. Exit code 1 if any promise was broken.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import benchmark
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.fault_run import outcomes, told
from support.fault_schedules import draw
from support.processes import Children

KINDS = {"waits_ms": "", "queued_ms": ", less waits for a core"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 1000), metavar=("FIRST", "END"), help="default: 0 1000")
    parser.add_argument("--stages", type=int, default=4, help="schedules at a time (default: 4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/cpu"))
    options = parser.parse_args()
    seeds, began_s = range(*options.seeds), time.monotonic()
    with Children() as children:
        found = outcomes(children, seeds, options.stages, options.device)
    record = record_of(found, options.device, options.stages, time.monotonic() - began_s)
    lines = lines_of(record)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "fault_schedules.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    (options.output / "fault_schedules.txt").write_text("\n".join(lines) + "\n", "utf-8")
    print("\n".join(lines))
    for outcome in found:
        if outcome["broken"]:
            print("\n" + told(outcome))
    raise SystemExit(1 if record["broken"] else 0)


def record_of(found: Sequence[dict[str, Any]], device: str, stages: int, took_s: float) -> dict[str, Any]:
    faults = [fault for outcome in found for fault in draw(outcome["seed"]).faults]
    happened = [line for outcome in found for line in outcome["happened"]]
    calls = sorted({call for outcome in found for call in outcome.get("waits_ms", {})})
    return {
        "seeds": [found[0]["seed"], found[-1]["seed"]],
        "schedules": len(found),
        "broken": {str(outcome["seed"]): outcome["broken"] for outcome in found if outcome["broken"]},
        "device": device,
        "stages": stages,
        "took_s": round(took_s, 1),
        "load": os.getloadavg(),
        "machine": benchmark.machine(device),
        "faults": dict(collections.Counter(f"{fault.what} {fault.how}".strip() for fault in faults)),
        "stopped_at_points": sum("came true" in line for line in happened),
        "rows_committed": sum(outcome.get("rows", 0) for outcome in found),
        "leases_revoked": sum(outcome.get("revoked", 0) for outcome in found),
        "stale_messages_refused": sum(outcome.get("stale_refused", 0) for outcome in found),
        "ms": {
            **{f"wait in {call}{less}": figures(found, waits_in(call, kind)) for kind, less in KINDS.items() for call in calls},
            "credits and leases back, dead gone": figures(found, lambda o: [o["settled_ms"]]),
            "a killed client's session ended": figures(found, lambda o: o["buried_ms"]),
            "a living client went on with a new server": figures(found, lambda o: o["went_on_ms"]),
        },
    }


def waits_in(call: str, kind: str) -> Callable[[dict[str, Any]], list[float]]:
    return lambda outcome: outcome[kind].get(call, [])


def figures(found: Sequence[dict[str, Any]], pick: Callable[[dict[str, Any]], list[float]]) -> dict[str, float]:
    values = [value for outcome in found if not outcome["broken"] for value in pick(outcome)]
    if not values:
        return {"n": 0}
    p50, p99 = np.percentile(values, (50, 99))
    return {"n": len(values), "p50": round(float(p50), 2), "p99": round(float(p99), 2), "longest": round(max(values), 2)}


def lines_of(record: dict[str, Any]) -> list[str]:
    machine, first, last = record["machine"], *record["seeds"]
    load = ", ".join(f"{value:.1f}" for value in record["load"])
    lines = [
        f"{record['schedules']} fault schedules, seeds {first} to {last}, {record['device']} ring: {len(record['broken'])} broke a promise",
        f"{machine['date']}, commit {machine['commit']}{' with local changes' if machine['has_local_changes'] else ''}",
        f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['system']}, Python {machine['python']}",
        f"{record['stages']} at a time, {record['took_s']:,} s; load of the machine at the end {load}",
        f"faults drawn: {', '.join(f'{count} {what}' for what, count in sorted(record['faults'].items()))}",
        f"{record['stopped_at_points']} processes stopped at a named point; {record['rows_committed']:,} rows came to the last servers,",
        f"{record['leases_revoked']} leases revoked, {record['stale_messages_refused']} stale messages refused and counted",
        "",
        f"{'ms':44}  {'n':>8}  {'p50':>8}  {'p99':>8}  {'longest':>8}",
    ]
    for what, found in record["ms"].items():
        if found["n"]:
            lines.append(f"{what:44}  {found['n']:8,}  {found['p50']:8.2f}  {found['p99']:8.2f}  {found['longest']:8.2f}")
    lines += [f"BROKEN seed {seed}: {broken[0].splitlines()[0]}" for seed, broken in record["broken"].items()]
    return lines


if __name__ == "__main__":
    main()
