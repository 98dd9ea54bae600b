"""Kills a snapshot at seeded points, again and again, and reads what is left each time: always one whole snapshot, bit for bit.

A server on the CPU is written to without a pause while `replay-server snapshot DIR --keep 2` is started and killed (SIGKILL) at a
moment drawn between its folder's appearance and a little after a whole one's end; every tenth at any moment since its start. After
each the newest snapshot is read as `serve --restore` reads it: every file against its sums, every row against what was written at its seq.
Usage: snapshot_kills.py [--kills 200] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
from replay_server_client import Collector, Schema

from replay_server import ReplayServer
from replay_server.saved.manifest import MANIFEST, newest, numbered
from replay_server.saved.rows import blocks
from replay_server.saved.tensor_file import Bytes

CAPACITY, WIDTH, SLOT_ROWS = 60_000, 64, 256
SCHEMA = Schema.of(wide=("int64", WIDTH), stamp="int64")
FACTORS = 2 * np.arange(WIDTH, dtype=np.int64) + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        ReplayServer.spawn(capacity=CAPACITY, device="cpu", slot_rows=SLOT_ROWS) as server,
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
    ):
        stop = threading.Event()
        writer = threading.Thread(target=write_until, args=(collector, stop))
        writer.start()
        try:
            found = kill_often(server, Path(folder), options.kills, random.Random(options.seed))  # noqa: S311  where to kill, no secret
        finally:
            stop.set()
            writer.join()
    print(f"seed {options.seed}: " + ", ".join(f"{what} {n}" for what, n in found.items()))
    return 1 if any(what.startswith("WRONG") for what in found) else 0


def write_until(collector: Collector, stop: threading.Event) -> None:
    """About 25 MB/s, so that the window moves on through every snapshot."""
    seq = 0
    while not stop.is_set():
        stamps = np.arange(seq, seq + SLOT_ROWS)
        collector.write({"wide": stamps[:, None] * FACTORS, "stamp": stamps})
        seq += SLOT_ROWS
        stop.wait(0.005)


def kill_often(server: ReplayServer, folder: Path, kills: int, chance: random.Random) -> Counter[str]:
    found: Counter[str] = Counter()
    whole_s, writing_s, _ = run(server, folder, None, from_start=False)
    while found["killed"] < kills:
        number = found["killed"] + found["ended before its kill"]
        begun = sum((path / MANIFEST).exists() for path in numbered(folder))
        before = newest(folder).path.name
        from_start = number % 10 == 9
        _, _, is_killed = run(server, folder, chance.uniform(0.0, whole_s if from_start else 1.2 * writing_s), from_start=from_start)
        half = sum(not (path / MANIFEST).exists() for path in numbered(folder))
        wrong = what_is_wrong(folder, before, begun)
        after = newest(folder)
        found["killed" if is_killed else "ended before its kill"] += 1
        if is_killed:
            found[
                "of them half-way" if half else "of them after the rename" if after.path.name != before else "of them before the first file"
            ] += 1
        if wrong:
            found[f"WRONG: {wrong}"] += 1
        rows = after.committed - after.tail
        print(
            f"{number:3d} newest {after.path.name} rows {rows} from {after.tail}, unfinished folders {half}: {wrong or 'whole'}", flush=True
        )
    return found


def run(server: ReplayServer, folder: Path, kill_after_s: float | None, *, from_start: bool) -> tuple[float, float, bool]:
    """One snapshot command, killed so long after its start or its folder's appearance; returns the seconds since either, and
    whether it was."""
    before, begin_s = set(numbered(folder)) if folder.exists() else set(), time.monotonic()
    command = [sys.executable, "-m", "replay_server", "snapshot", str(folder), "--keep", "2", "--background"]
    child = subprocess.Popen([*command, "--name", server.name, "--run-dir", server.run_dir])
    while not from_start and child.poll() is None and not set(numbered(folder)) - before:
        time.sleep(0.0005)
    appeared_s, is_killed = time.monotonic(), False
    try:
        status = child.wait(kill_after_s)
        if status:
            raise SystemExit(f"a snapshot that nobody killed ended with {status}")
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
        is_killed = child.wait() == -signal.SIGKILL
    return time.monotonic() - begin_s, time.monotonic() - appeared_s, is_killed


def what_is_wrong(folder: Path, before: str, begun: int) -> str | None:
    """None, or what a restore would stumble over; a typed error of the reading ends the script."""
    manifest = newest(folder)
    if int(manifest.path.name) < int(before) or sum((path / MANIFEST).exists() for path in numbered(folder)) < min(begun, 2):
        return f"a snapshot of before is gone; the newest was {before}"
    next_seq = manifest.tail
    for block in blocks(manifest, manifest.tail, 4096):
        if block.seqs[0] != next_seq or not is_as_written(block.seqs, block.arrays["wide"], block.arrays["stamp"]):
            return f"rows from seq {block.seqs[0]}"
        next_seq = int(block.seqs[-1]) + 1
    return None if next_seq == manifest.committed else f"rows end at {next_seq}, not at {manifest.committed}"


def is_as_written(seqs: np.ndarray[tuple[int], np.dtype[np.int64]], wide: Bytes, stamp: Bytes) -> bool:
    is_stamped = np.array_equal(stamp.view(np.int64), seqs)
    return is_stamped and np.array_equal(wide.view(np.int64).reshape(len(seqs), WIDTH), seqs[:, None] * FACTORS)


if __name__ == "__main__":
    sys.exit(main())
