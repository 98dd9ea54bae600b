#!/usr/bin/env python3
"""Delivery and sampling past any machine at hand: the real Credits, Delivery, Origins and Router against simulated shards and networks.

Real here: credits on both sides, which publishes go into which chunk, window, go-back and waits between failures, the receiver's judgement,
membership, epochs, counts and redraws. Simulated: time. The assumptions, each with a number of its own in ``Costs``:

1. A call costs its sender ``call_s`` and its bytes at ``copy_bandwidth`` of one thread, one after the other. Chunks up to 100 KB travel in
   the call itself (``inline_…``), larger ones by the object store.
2. Bytes cross a link at ``bandwidth`` after ``latency_s`` each way; a node's calls share its link in the order in which they were sent.
3. A host serves calls one at a time: ``serve_s`` each, and its bytes at ``commit_bandwidth`` (Ray's copies and the slots' together).
4. A killed host answers nothing, loses what it knew, and is back after ``restart_s``; a lost node does not come back; its calls fail
   after ``notice_s``. Sidecars keep their rings, but those on a lost node.
5. Shards fill at a steady rate up to their capacity, and are uniform inside: which rows a shard draws is not simulated.
6. Shards don't share cores or links, so what one takes in, S take in S times. On the machine of the measurement they all share: there two
   shards' times add up, and so they do in ``check``.
7. While a sidecar commits nothing (samples per insert, say), it keeps what it has credits for; the host answers after ``deliver_wait_s``.

The first three are fitted to the runs of scripts/bench_ray.py on two nodes of one machine, and ``check`` puts model beside measurement:
rates with a window of one and of four are what it was fitted to, those with two, and the times of two shards, are its own word.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scaling.costs import Costs
from scaling.delivery import ingest
from scaling.picture import plot
from scaling.sampling import batch_s, sample


def check(measured: dict[str, Any]) -> list[dict[str, float]]:
    """The model with fitted costs beside each measurement."""
    costs, rows = Costs.fitted(measured), []
    for run in measured["carried"]:
        model = ingest(costs, chunk_bytes=run["chunk_bytes"], window=run["window"], seconds=1.0)
        rows.append({"chunk_bytes": run["chunk_bytes"], "window": run["window"], "measured_mib_per_s": run["mib_per_s"],
                     "model_mib_per_s": model["mib_per_s"], "ratio": model["mib_per_s"] / run["mib_per_s"]})  # fmt: skip
    for run in measured["batches"]:
        if not run["prefetch"]:
            model_ms = run["shards"] * batch_s(costs, [run["n"] // run["shards"]], measured["row_bytes"]) * 1e3
            rows.append({"shards": run["shards"], "n": run["n"], "measured_ms": run["ms_per_batch"], "model_ms": model_ms,
                         "ratio": model_ms / run["ms_per_batch"]})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, help="what scripts/bench_ray.py wrote: costs are fitted to it and compared with it")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000])
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder for simulate_scale.json and .png")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    costs = Costs()
    if options.measured:
        measured = json.loads(options.measured.read_text())
        fitted = Costs.fitted(measured)
        result["fitted"], result["check"] = asdict(fitted), check(measured)
        for row in result["check"]:
            print({key: round(value, 2) for key, value in row.items()})
        costs = replace(fitted, latency_s=costs.latency_s, bandwidth=costs.bandwidth)  # these a loopback does not tell
    result["costs"] = asdict(costs)
    result["sampling"] = [sample(costs, s, batches=options.batches) for s in options.shards]
    filling = [s for s in options.shards if s > 1]
    result["filling"] = [sample(costs, s, batches=options.batches, full=0.2, fill_rows_per_s=1e10 / s / 30) for s in filling]
    result["losing"] = [sample(costs, s, batches=options.batches, lose_share=0.1) for s in filling]
    result["ingest_by_latency"] = [
        {"latency_s": latency, "window": w, "chunk_bytes": c, **_brief(ingest(replace(costs, latency_s=latency), window=w, chunk_bytes=c))}
        for latency in (2e-5, 1e-4, 1e-3, 1e-2) for w in (1, 4, 16) for c in (1 << 16, 1 << 20, 1 << 22)
    ]  # fmt: skip
    result["ingest_by_senders"] = [{"senders": k, **_brief(ingest(costs, senders=k))} for k in (1, 2, 4, 8, 16, 32, 64)]
    result["ingest_killed"] = ingest(costs, seconds=12.0, kills_s=(2.0, 5.0))
    result["ingest_stalled"] = ingest(costs, seconds=12.0, stalled_s=(3.0, 7.0))
    for row in result["sampling"]:
        print({key: row[key] for key in ("shards", "ms_per_batch", "rows_per_s", "drawn_error", "chance")})
    if options.out:
        (options.out / "simulate_scale.json").write_text(json.dumps(result) + "\n")
        plot(result, options.out / "simulate_scale.png")


def _brief(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if not key.endswith("over_time")}


if __name__ == "__main__":
    main()
