"""A forwarder is killed again and again while collectors publish through it: every publish is in the ring once, and none is lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_server_client import Collector
from replay_server_client.observer import Observer
from replay_server_client.ray.host_service import HostService
from replay_server_client.status import query
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.schema import Schema
from support.processes import Child, Children
from support.rarely import rarely
from support.relays import HostDoor, spawn_relay
from support.servers import ServerProcess, spawn_server

SCHEMA = Schema.of(marker="int64", reward="float32", terminated="bool", truncated="bool")
LANES, LENGTH = 2, 10
COLUMNS = ("--columns", "link", "--moments", "reward,return")


@pytest.fixture
def sidecar(children: Children, crash_dir: Path) -> Iterator[ServerProcess]:
    sidecar = spawn_server(children, crash_dir, "--capacity", "100000", "--slot-rows", "16", "--depth", "4", *COLUMNS)
    yield sidecar
    sidecar.stop()


@pytest.fixture
def door(sidecar: ServerProcess, crash_dir: Path) -> Iterator[HostDoor]:
    host = HostService(sidecar.name, str(sidecar.run_dir))
    door = HostDoor(host, crash_dir / "door", seed=5)
    yield door
    door.close()
    host.close()


def steps(first: int, n: int) -> dict[str, object]:
    """``n`` steps of both lanes from step ``first`` on: a row says which one it is, and an episode ends with every tenth step."""
    step = np.repeat(np.arange(first, first + n), LANES)
    return {
        "marker": step * LANES + np.tile(np.arange(LANES), n),
        "reward": np.ones(n * LANES, np.float32),
        "terminated": step % LENGTH == LENGTH - 1,
        "truncated": np.zeros(n * LANES, np.bool_),
    }


class Killer:
    """Keeps a relay running, which it kills ``kills`` times, each time after some deliveries."""

    def __init__(self, children: Children, crash_dir: Path, door: HostDoor, kills: int, seed: int) -> None:
        self.killed = 0
        self.is_over = threading.Event()
        self._rng, self._kills = random.Random(seed), kills
        self._children, self._run_dir = children, crash_dir
        self._door = door
        self._relay = self._spawn()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _spawn(self) -> Child:
        return spawn_relay(self._children, "node", self._run_dir, self._door, depth=6)

    def _run(self) -> None:
        while self.killed < self._kills:
            due = self._door.deliveries + self._rng.randint(1, 40)
            while self._door.deliveries < due:
                self.is_over.wait(0.002)
            self._relay.kill()
            self.killed += 1
            self._relay = self._spawn()
        self.is_over.set()

    def close(self) -> None:
        self._thread.join(60)
        self._relay.kill()


@pytest.mark.parametrize("kills", [3, *rarely(30)])
def test_every_row_is_in_the_ring_once_and_in_order_with_its_chains_and_sums(
    children: Children, crash_dir: Path, sidecar: ServerProcess, door: HostDoor, kills: int
) -> None:
    killer = Killer(children, crash_dir, door, kills, seed=3)
    rng, written = random.Random(4), {"one": 0, "two": 0}
    collectors = {name: Collector.connect("node", schema=SCHEMA, lanes=LANES, name=name, run_dir=crash_dir, timeout=30) for name in written}
    try:
        while not killer.is_over.is_set():
            name, n = rng.choice(("one", "two")), rng.randint(1, 20)
            offset = 0 if name == "one" else 10**6
            collectors[name].write(steps(offset + written[name], n))
            written[name] += n
            killer.is_over.wait(rng.random() * 0.004)
        for collector in collectors.values():
            collector.flush(30)
        told = [collector.statistics() for collector in collectors.values()]
    finally:
        for collector in collectors.values():
            collector.close()
        killer.close()
    assert (killer.killed, sum(each.rows_lost for each in told)) == (kills, 0)
    assert sum(each.publishes_resumed for each in told) > kills
    report: Any = query(Endpoints.resolve(sidecar.name, crash_dir))
    rows = LANES * sum(written.values())
    assert (report["counters"]["rows_published"], report["counters"]["rows_committed"]) == (rows, rows)
    assert report["moments"]["reward"]["count"] == report["moments"]["return"]["count"] == rows
    assert report["episodes"]["count"] == LANES * sum(count // LENGTH for count in written.values())
    assert (report["episodes"]["length"]["min"], report["episodes"]["length"]["max"]) == (LENGTH, LENGTH)
    with Observer.connect(sidecar.name, run_dir=crash_dir) as observer:
        found = observer.read(newest=10**6)["marker"].tolist()
        (link,) = [chunk.link.tolist() for chunk in observer.chunks(1 << 20) if chunk.link is not None]
    follows = [found[after] - marker for marker, after in zip(found, link, strict=True) if after >= 0]
    assert follows == [LANES] * (rows - LANES * len(written)), "each row leads to the next one of its lane, but the last ones"
    for offset, count in zip((0, 10**6), written.values(), strict=True):
        its = [marker for marker in found if offset * LANES <= marker < (offset + 10**6) * LANES]
        assert its == list(range(offset * LANES, (offset + count) * LANES))
