"""This server on the CPU ring beside DeepMind Reverb: the same row, batch, capacity and durations, the sides taking turns.

One row is 430 float32, a batch 2,048 rows, the table 100,000 rows. One writer for 3 s, then one reader for 4 s.
  insert      Reverb: append and create_item for every row, a flush every 512; ours: steps of 512 lanes, a flush at the end
  row by row  ours with one lane and one row a write: the same shape of call as Reverb's
  sample      Reverb: a TrajectoryDataset, batched; ours: Learner.sample on the CPU
Give the interpreter of an environment with ``dm-reverb`` (Python 3.11, pip install 'dm-reverb[tensorflow]==0.14.0') by --peer-python.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import benchmark
import numpy as np
from benchmark import OURS, ROW_FLOATS, Options, Report, serve
from replay_server_client import Collector, Learner, Schema

PEER = "reverb"
CAPACITY, LANES, BATCH_ROWS = 100_000, 512, 2048
TIMEOUT_S = 20.0
PREFETCH = 5
INSERT, SAMPLE, ROW_BY_ROW = "insert", "sample", "insert, row by row"


def main() -> None:
    options = benchmark.parse(__doc__, add_options)
    options = Options("cpu", options.runs, options.quick, options.output, options.seed, options.arguments)
    report = Report("bench_cpu", options)
    found: dict[tuple[str, str], list[float]] = {}
    outputs: list[dict[str, Any]] = []
    for _ in range(options.runs):
        sides = [(OURS, ours(options))]
        if options.arguments.peer_python:
            answer = peer(options)
            outputs.append(answer)
            sides.append((PEER, {INSERT: answer["insert_rows_per_s"], SAMPLE: answer["sample_rows_per_s"]}))
        for side, figures in sides:
            for what, rate in figures.items():
                found.setdefault((what, side), []).append(rate)
    for (what, side), rates in found.items():
        report.add(what, what, side, "rows/s", rates)
    report.raw["reverb's own output"] = outputs
    report.expect_ratio(INSERT, OURS, PEER, at_least=40)
    report.expect_ratio(SAMPLE, OURS, PEER, at_least=20)
    report.publish()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer-python", type=Path, help="interpreter that has dm-reverb; without it only this server is measured")


def ours(options: Options) -> dict[str, float]:
    """Rows a second of each measurement, on a fresh server."""
    insert_s, sample_s = durations(options)
    schema = Schema.of(row=("float32", ROW_FLOATS))
    rows = np.random.default_rng(options.seed).standard_normal((LANES, ROW_FLOATS), dtype=np.float32)
    with serve(options, capacity=CAPACITY) as server:
        where: dict[str, Any] = {"run_dir": server.run_dir, "timeout": TIMEOUT_S}
        with Collector.connect(server.name, schema=schema, lanes=LANES, **where) as collector:
            inserted = write_for(collector, rows, insert_s)
        with Collector.connect(server.name, schema=schema, lanes=1, **where) as collector:
            one_by_one = write_for(collector, rows[:1], insert_s)
        # Batches ahead, as the peer's dataset keeps them.
        with Learner.connect(server.name, device="cpu", seed=options.seed, prefetch=PREFETCH, **where) as learner:
            sampled = sample_for(learner, sample_s)
    return {INSERT: inserted, ROW_BY_ROW: one_by_one, SAMPLE: sampled}


def write_for(collector: Collector, rows: Any, duration_s: float) -> float:
    """Rows a second, until the last one is committed."""
    written, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < duration_s:
        collector.write({"row": rows})
        written += len(rows)
    collector.flush(timeout=TIMEOUT_S)
    return written / (time.perf_counter() - start_s)


def sample_for(learner: Learner, duration_s: float) -> float:
    """Rows a second; the first batch, which sets the request up, does not count."""
    learner.sample(BATCH_ROWS, timeout=TIMEOUT_S)
    rows, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < duration_s:
        rows += len(learner.sample(BATCH_ROWS, timeout=TIMEOUT_S))
    return rows / (time.perf_counter() - start_s)


def peer(options: Options) -> dict[str, Any]:
    """Reverb's answer: rates and versions."""
    insert_s, sample_s = durations(options)
    shape = {
        "row_floats": ROW_FLOATS,
        "capacity": CAPACITY,
        "flush_rows": LANES,
        "batch_rows": BATCH_ROWS,
        "insert_s": insert_s,
        "sample_s": sample_s,
        "seed": options.seed,
    }
    script = Path(__file__).parent / "peers" / "reverb_cpu.py"
    command = [str(options.arguments.peer_python), str(script), json.dumps(shape)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if found.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:2])} ended with {found.returncode}:\n{found.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return answer


def durations(options: Options) -> tuple[float, float]:
    return (0.5, 0.5) if options.quick else (3.0, 4.0)


if __name__ == "__main__":
    main()
