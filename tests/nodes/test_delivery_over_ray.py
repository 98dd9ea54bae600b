"""Rows of collectors on another node, over Ray: each publish committed once, whatever is killed on the way."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_server_client import Collector
from replay_server_client.observer import Observer
from replay_server_protocol.errors import ServerGone
from replay_server_protocol.schema import Schema
from support.servers import ServerProcess

pytestmark = pytest.mark.slow  # minutes, with all of a cluster for themselves: scripts/test ray
SCHEMA = Schema.of({"marker": ("int64", ()), "frame": ("uint8", (248,))})
ROWS, PUBLISHES, KILLS = 16, 2000, 20


def rows(first: int, n: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"marker": np.arange(first, first + n), "frame": np.zeros((n, 248), np.uint8)}


def markers(sidecar: ServerProcess) -> list[int]:
    with Observer.connect(sidecar.name, run_dir=sidecar.run_dir) as observer:
        found: list[int] = observer.read(newest=10**6, fields=["marker"])["marker"].tolist()
        return found


class Killer:
    """Ends the host's process with kill -9, again and again, each time after it has answered for a while."""

    def __init__(self, host: Any, kills: int, seed: int) -> None:
        self.killed = 0
        self._host, self._kills, self._rng = host, kills, random.Random(seed)
        self._thread = threading.Thread(target=self._run)
        self.is_over = threading.Event()
        self._thread.start()

    def _run(self) -> None:
        import ray

        last = 0
        while self.killed < self._kills and not self.is_over.is_set():
            with contextlib.suppress(ray.exceptions.RayError):
                pid = ray.get(self._host.report.remote(), timeout=5)["pid"]
                if pid != last:
                    time.sleep(self._rng.random() * 0.3)  # a kill may come at any moment of its work
                    os.kill(pid, 9)
                    self.killed, last = self.killed + 1, pid
        self.is_over.set()

    def join(self) -> None:
        self._thread.join(60)


@pytest.mark.timeout(400)
def test_every_publish_is_committed_once_though_the_host_is_killed_twenty_times(
    ray_nodes: Any, sidecars: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    from replay_server_client.ray.cluster import start_forwarder, start_host

    gpu, away = ray_nodes.add("gpu"), ray_nodes.add("away")
    sidecar = sidecars("--capacity", "200000", "--slot-rows", str(ROWS), "--depth", "4", "--columns", "link")
    host = start_host("g1", server=sidecar.name, run_dir=sidecar.run_dir, node_id=gpu)
    forwarder = start_forwarder("g1", name="away", run_dir=sidecar.run_dir, node_id=away, depth=16, chunk_bytes=1)
    import ray

    killer: Killer | None = None
    with Collector.connect("away", run_dir=sidecar.run_dir, schema=SCHEMA, timeout=60) as collector:
        collector.write(rows(0, ROWS))
        collector.flush(60)
        killer = Killer(host, KILLS, 7)
        for step in range(1, PUBLISHES):
            with collector.slot(timeout=60) as slot:
                slot["marker"][:ROWS] = np.arange(ROWS * step, ROWS * (step + 1))
                slot["frame"][:ROWS] = 0
                slot.rows = ROWS
            if step % 95 == 0 and not killer.is_over.is_set():  # spread the chunks over the kills
                seen = killer.killed
                while killer.killed == seen and not killer.is_over.is_set():
                    time.sleep(0.01)
        collector.flush(60)
        assert collector.statistics().rows_lost == 0
    killer.is_over.set()
    killer.join()
    report = ray.get(forwarder.report.remote())["shards"]["g1"]
    print(f"kills {killer.killed}, {report}")
    assert killer.killed == KILLS
    assert report["chunks"] >= PUBLISHES  # one publish a chunk here
    assert report["parts_sent_again"] > 0
    assert markers(sidecar) == list(range(ROWS * PUBLISHES))


@pytest.mark.timeout(200)
def test_a_killed_forwarder_costs_only_rows_without_a_credit_and_the_command_shows_the_cluster(
    ray_nodes: Any, sidecars: Callable[..., ServerProcess]
) -> None:
    import ray
    from replay_server_client.ray.cluster import start_forwarder, start_host

    gpu, away = ray_nodes.add("gpu-2"), ray_nodes.add("away-2")
    sidecar = sidecars("--capacity", "20000", "--slot-rows", str(ROWS))
    start_host("g2", server=sidecar.name, run_dir=sidecar.run_dir, node_id=gpu)
    forwarder = start_forwarder("g2", name="away2", run_dir=sidecar.run_dir, node_id=away)
    with Collector.connect("away2", run_dir=sidecar.run_dir, schema=SCHEMA, timeout=60) as collector:
        collector.write(rows(0, 10 * ROWS))
        collector.flush(60)
        pid = ray.get(forwarder.report.remote())["pid"]
        collector.write(rows(10 * ROWS, 4 * ROWS))
        os.kill(pid, 9)
        collector.write(rows(14 * ROWS, 40 * ROWS), timeout=60)
        with contextlib.suppress(ServerGone):  # tells how many rows were lost
            collector.flush(60)
        collector.flush(60)
        lost = collector.statistics().rows_lost
    found = markers(sidecar)
    assert len(found) == len(set(found))
    assert set(range(10 * ROWS)) <= set(found)
    assert 54 * ROWS - lost <= len(found) <= 54 * ROWS

    command = [sys.executable, "-m", "replay_server", "status", "--cluster", ray_nodes.cluster.address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert f"shard    g2: up, server {sidecar.name!r}" in shown
    assert "to shard 'g2'" in shown
