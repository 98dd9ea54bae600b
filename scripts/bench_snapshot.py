"""What a snapshot costs whoever uses the server meanwhile, how fast it is, and what memory it takes.

  ingest      one collector, a process of its own, writes as fast as it is let
  sampling    a learner in this process draws batches of 256 rows one after the other, while the collector writes
Each is measured alone and while `replay-server snapshot` runs again and again at its background priority; the two take turns. The ring is
in host memory, the snapshots go to the temporary folder (TMPDIR): what its disk does is part of the figures.
"""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import benchmark
from bench_ingest import collect
from benchmark import OURS, Options, Report, serve, transition_schema
from replay_server_client import Learner

TIMEOUT_S = 60.0
SLOT_ROWS, BATCH_ROWS = 512, 256


def main() -> None:
    options = benchmark.parse(__doc__)
    report = Report("bench_snapshot", options)
    found: dict[str, list[float]] = {}
    for _ in range(options.runs):
        for what, value in run_once(options).items():
            found.setdefault(what, []).append(value)
    for what, values in found.items():
        unit = what.rpartition(", ")[2]
        report.add("snapshot itself" if what.startswith("snapshot") else "beside a snapshot", what, OURS, unit, values)
    report.publish()


def run_once(options: Options) -> dict[str, float]:
    capacity, window_s = options.pick(400_000, 20_000), options.pick(3.0, 0.5)
    found: dict[str, float] = {}
    context = multiprocessing.get_context("spawn")
    running, stop = context.Event(), context.Event()
    with serve(options, capacity=capacity, slot_rows=SLOT_ROWS, depth=2) as server, tempfile.TemporaryDirectory() as folder:
        arguments = (server.name, str(server.run_dir), SLOT_ROWS, True, options.seed, running, stop)
        collector = context.Process(target=collect, args=arguments, daemon=True)
        collector.start()
        try:
            wait_for_rows(server, capacity)
            found["snapshot, at full ingest, MB/s"], found["snapshot, peak memory, MB"], left_out = snapshot(server, folder)
            found["snapshot, rows left out, share"] = left_out / capacity
            for name in "alone", "snapshot under way":
                with snapshots_meanwhile(server, folder, name != "alone"):
                    found[f"ingest, {name}, GB/s"] = ingest_gb_per_s(server, window_s)
                    found[f"sampling, {name}, batches/s"] = batches_per_s(options, server, window_s)
        finally:
            stop.set()
            collector.join(TIMEOUT_S)
        found["snapshot, nobody writes, MB/s"], _, _ = snapshot(server, folder)
    return found


def wait_for_rows(server: Any, rows: int) -> None:
    end = time.monotonic() + TIMEOUT_S
    while (server.status()["ring"] or {"committed": 0})["committed"] < rows:
        if time.monotonic() > end:
            raise TimeoutError("the ring did not fill")
        time.sleep(0.05)


def snapshot(server: Any, folder: str, *more: str) -> tuple[float, float, int]:
    """MB/s, peak memory in MB and the rows left out, as the command tells them."""
    command = [sys.executable, "-m", "replay_server", "snapshot", folder, "--keep", "1", *more]
    command += ["--name", server.name, "--run-dir", str(server.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode and "none could be kept" not in done.stderr:
        raise RuntimeError(done.stderr)
    told = re.search(r"([0-9,]+) MB/s; peak memory ([0-9,]+) MB", done.stdout)
    left_out = re.search(r"([0-9,]+) older rows", done.stdout)
    if told is None:
        return 0.0, 0.0, 0  # ingest overwrote all of it, or nothing is told
    return number(told[1]), number(told[2]), int(number(left_out[1])) if left_out else 0


def number(text: str) -> float:
    return float(text.replace(",", ""))


@contextmanager
def snapshots_meanwhile(server: Any, folder: str, is_wanted: bool) -> Iterator[None]:
    stop = threading.Event()

    def again() -> None:
        while not stop.is_set():
            snapshot(server, folder, "--background")

    thread = threading.Thread(target=again)
    if is_wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if is_wanted:
            thread.join()


def ingest_gb_per_s(server: Any, window_s: float) -> float:
    before, begin_s = server.status()["ring"]["committed"], time.perf_counter()
    time.sleep(window_s)
    rows: int = server.status()["ring"]["committed"] - before
    return rows * transition_schema().stride / (time.perf_counter() - begin_s) / 1e9


def batches_per_s(options: Options, server: Any, window_s: float) -> float:
    with Learner.connect(server.name, device=options.device, run_dir=server.run_dir, timeout=TIMEOUT_S) as learner:
        learner.sample(BATCH_ROWS)
        batches, begin_s = 0, time.perf_counter()
        while time.perf_counter() - begin_s < window_s:
            learner.sample(BATCH_ROWS)
            batches += 1
        return batches / (time.perf_counter() - begin_s)


if __name__ == "__main__":
    main()
