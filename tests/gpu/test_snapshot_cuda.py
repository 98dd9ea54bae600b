"""Snapshots of a ring on a GPU: the same bits on a GPU and in host memory after a restore, with links, priorities and newer values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from replay_server_client import Collector, Field, Learner, Observer, Schema
from support.servers import ServerProcess

from replay_server.snapshot.writer import take_snapshot

pytestmark = pytest.mark.gpu

CUDA = ("--device", "cuda")
SCHEMA = Schema.of(wide=("float32", 256), reward=Field("float32", mutable=True), stamp="int64", terminated="bool")
ROWS = 40_000


def all_rows(server: ServerProcess) -> tuple[tuple[int, int], dict[str, npt.NDArray[np.generic]]]:
    with Observer.connect(server.name, run_dir=server.run_dir) as observer:
        return observer.window(), observer.read(newest=ROWS).fields


def draws(server: ServerProcess, device: str) -> list[int]:
    with Learner.connect(server.name, device=device, run_dir=server.run_dir, seed=5, name="same") as learner:
        found: list[int] = learner.sample(256, by="priority", alpha=1.0).seqs.tolist()  # sums of whole numbers: exact on both devices
        return found


def test_a_ring_on_a_gpu_is_restored_bit_for_bit_on_a_gpu_and_in_host_memory(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = start_server(*CUDA, "--capacity", "30000", "--slot-rows", "512", "--columns", "link,priority")
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, lanes=4) as collector:
        for first in range(0, ROWS, 500):
            stamp = np.arange(first, first + 500)
            wide = (stamp[:, None] * np.arange(1, 257)).astype(np.float32)
            collector.write({"wide": wide, "reward": stamp.astype(np.float32), "stamp": stamp, "terminated": stamp % 7 == 0})
        collector.flush()
    with Learner.connect(server.name, device="cuda", run_dir=server.run_dir) as learner:
        for _ in range(4):
            batch = learner.sample(512, by="priority")
            learner.update_priorities(batch, batch["reward"].abs() + 1)
            learner.update(batch, {"reward": -batch["reward"]})
    with Observer.connect(server.name, run_dir=server.run_dir) as observer:
        taken = take_snapshot(observer, tmp_path, file_bytes=8 << 20)
    assert (taken.manifest.tail, taken.manifest.committed) == (ROWS - 30_000, ROWS)
    window, expected = all_rows(server)
    drawn = draws(server, "cuda")
    for device in "cuda", "cpu":
        restored = start_server("--restore", str(tmp_path), "--device", device)
        found_window, found = all_rows(restored)
        assert found_window == window
        for name, values in expected.items():
            assert found[name].tobytes() == values.tobytes(), name
        assert draws(restored, device) == drawn
