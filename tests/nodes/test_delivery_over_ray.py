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
from replay_server_client.collector_statistics import CollectorStatistics
from replay_server_client.observer import Observer
from replay_server_client.status import query
from replay_server_protocol.endpoints import Endpoints
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


def report_of(actor: Any) -> Any:
    """It may be on its way back from a kill."""
    import ray

    end_s = time.monotonic() + 60
    while True:
        try:
            return ray.get(actor.report.remote(), timeout=60)
        except ray.exceptions.RayError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)


class Killer:
    """Ends an actor's process with kill -9, again and again: ``within_s`` after it has answered and, a forwarder, has sent up to
    ``most_chunks``."""

    def __init__(self, actor: Any, kills: int, seed: int, within_s: float = 0.3, most_chunks: int = 0) -> None:
        self.killed = 0
        self.kills = kills
        self._actor, self._rng, self._within_s, self._most_chunks = actor, random.Random(seed), within_s, most_chunks
        self._thread = threading.Thread(target=self._run)
        self.is_over = threading.Event()
        self._thread.start()

    def _run(self) -> None:
        import ray

        last, chunks = 0, self._rng.randint(0, self._most_chunks)
        while self.killed < self.kills and not self.is_over.is_set():
            with contextlib.suppress(ray.exceptions.RayError):
                report = ray.get(self._actor.report.remote(), timeout=5)
                if report["pid"] != last and sum(shard["chunks"] for shard in report.get("shards", {}).values()) >= chunks:
                    time.sleep(self._rng.random() * self._within_s)  # a kill may come at any moment of its work
                    os.kill(report["pid"], 9)
                    self.killed, last = self.killed + 1, report["pid"]
                    chunks = self._rng.randint(0, self._most_chunks)
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


class Steps(threading.Thread):
    """A collector that publishes numbered rows, and waits now and then for the next kill: so the publishes are spread over all of them."""

    def __init__(self, forwarder: str, number: int, run_dir: Path, publishes: int, killer: Killer) -> None:
        super().__init__()
        self.forwarder = forwarder
        self.name = f"collector-{number}"
        self.first = number * 10**6
        self.error: BaseException | None = None
        self.told: CollectorStatistics | None = None
        self._run_dir, self._publishes, self._killer = run_dir, publishes, killer

    def run(self) -> None:
        try:
            with Collector.connect(self.forwarder, run_dir=self._run_dir, schema=SCHEMA, name=self.name, timeout=100) as collector:
                self._write(collector)
                collector.flush(100)
                self.told = collector.statistics()
        except BaseException as error:  # noqa: BLE001 - told by the test
            self.error = error

    def _write(self, collector: Collector) -> None:
        killer, pauses = self._killer, 0
        for step in range(self._publishes):
            if step % 2:
                collector.write(rows(self.first + ROWS * step, ROWS))
            else:
                with collector.slot(timeout=100) as slot:
                    slot["marker"][:ROWS] = np.arange(self.first + ROWS * step, self.first + ROWS * (step + 1))
                    slot["frame"][:ROWS] = 0
                    slot.rows = ROWS
            if step * (killer.kills + 1) // self._publishes > pauses:
                pauses += 1
                while killer.killed < pauses and not killer.is_over.is_set():
                    time.sleep(0.01)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("host_kills", [0, 10])
def test_every_publish_is_committed_once_and_in_order_though_the_forwarder_is_killed_twenty_times(
    ray_nodes: Any, sidecars: Callable[..., ServerProcess], host_kills: int
) -> None:
    from replay_server_client.ray.cluster import start_forwarder, start_host

    shard, name = f"g-{host_kills}", f"away-{host_kills}"
    gpu, away = ray_nodes.add(f"gpu-{shard}"), ray_nodes.add(f"away-{shard}")
    sidecar = sidecars("--capacity", "200000", "--slot-rows", str(ROWS), "--depth", "4", "--columns", "link")
    host = start_host(shard, server=sidecar.name, run_dir=sidecar.run_dir, node_id=gpu)
    forwarder = start_forwarder(shard, name=name, run_dir=sidecar.run_dir, node_id=away, depth=16, chunk_bytes=1 << 14)
    killer = Killer(forwarder, KILLS, 11, within_s=0.02, most_chunks=20)
    host_killer = Killer(host, host_kills, 12, within_s=3.0)
    players = [Steps(name, number, sidecar.run_dir, PUBLISHES // 2, killer) for number in range(2)]
    for player in players:
        player.start()
    for player in players:
        player.join(550)
    for each in (killer, host_killer):
        each.is_over.set()
        each.join()
    assert [player.error for player in players] == [None, None]
    found = markers(sidecar)
    counters = query(Endpoints.resolve(sidecar.name, sidecar.run_dir))["counters"]
    told = [player.told for player in players if player.told is not None]
    published, resumed = sum(each.publishes for each in told), sum(each.publishes_resumed for each in told)
    repeated = report_of(host)["parts_repeated"]
    print(f"kills of the forwarder {killer.killed}, of the host {host_killer.killed}; publishes {published}, of which {resumed} were made")
    print(f"again to the next forwarder; {repeated} of those the host knew (since its last start); rows in the ring {len(found)}")
    assert killer.killed == KILLS
    for player in players:
        its = [marker for marker in found if player.first <= marker < player.first + 10**6]
        assert its == list(range(player.first, player.first + ROWS * PUBLISHES // 2))
    assert sum(each.rows_lost for each in told) == 0
    assert resumed > KILLS
    assert repeated > 0 or host_kills  # a host that is killed forgets its count
    assert len(found) == ROWS * PUBLISHES
    assert isinstance(counters, dict)
    assert (counters["rows_published"], counters["rows_rejected"], counters["rows_lost"]) == (ROWS * PUBLISHES, 0, 0)

    report_of(forwarder)
    command = [sys.executable, "-m", "replay_server", "status", "--cluster", ray_nodes.cluster.address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert f"shard    {shard}: up, server {sidecar.name!r}" in shown
    assert f"to shard {shard!r}" in shown
