"""A forwarder is killed again and again while collectors publish through it: every publish is in the ring once, and none is lost."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_server_client import Collector
from replay_server_client.observer import Observer
from replay_server_client.ray.host_service import HostService
from replay_server_client.ray.spread import shard_of
from replay_server_client.status import query
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.schema import Schema
from support.processes import Children
from support.relays import HostDoor, spawn_relay
from support.servers import ServerProcess, spawn_server

SCHEMA = Schema.of(marker="int64", reward="float32", terminated="bool", truncated="bool")
LANES, LENGTH, APART = 2, 10, 10**6
COLUMNS = ("--columns", "link", "--moments", "reward,return")


@contextlib.contextmanager
def shard(children: Children, crash_dir: Path, seed: int) -> Iterator[tuple[ServerProcess, HostDoor]]:
    sidecar = spawn_server(children, crash_dir, "--capacity", "100000", "--slot-rows", "16", "--depth", "4", *COLUMNS)
    host = HostService(sidecar.name, str(sidecar.run_dir))
    door = HostDoor(host, crash_dir / f"door{seed}", seed)
    yield sidecar, door
    door.close()
    host.close()
    sidecar.stop()


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

    def __init__(self, children: Children, run_dir: Path, doors: Sequence[HostDoor], kills: int, seed: int) -> None:
        self.killed = 0
        self.is_over = threading.Event()
        self._rng, self._kills = random.Random(seed), kills
        self._spawn = partial(spawn_relay, children, "node", run_dir, 6, doors)
        self._doors = doors
        self._relay = self._spawn()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def _deliveries(self) -> int:
        return sum(door.deliveries for door in self._doors)

    def _run(self) -> None:
        while self.killed < self._kills:
            due = self._deliveries + self._rng.randint(1, 40)
            while self._deliveries < due:
                self.is_over.wait(0.002)
            self._relay.kill()
            self.killed += 1
            self._relay = self._spawn()
        self.is_over.set()

    def close(self) -> None:
        self._thread.join(60)
        self._relay.kill()


@dataclass
class Writer:
    """One of the collectors; its steps begin at a number of its own."""

    collector: Collector
    first: int
    written: int = 0

    def write(self, n: int) -> None:
        self.collector.write(steps(self.first + self.written, n))
        self.written += n

    def rows_of(self, found: list[int]) -> list[int]:
        return [marker for marker in found if self.first * LANES <= marker < (self.first + APART) * LANES]

    def assert_whole(self, found: list[int]) -> None:
        assert self.rows_of(found) == list(range(self.first * LANES, (self.first + self.written) * LANES))


def assert_holds(sidecar: ServerProcess, writers: list[Writer]) -> None:
    """The ring has the rows of these and no others, and the server's sums are theirs."""
    report: Any = query(Endpoints.resolve(sidecar.name, sidecar.run_dir))
    rows = LANES * sum(writer.written for writer in writers)
    assert (report["counters"]["rows_published"], report["counters"]["rows_committed"]) == (rows, rows)
    assert report["moments"]["reward"]["count"] == report["moments"]["return"]["count"] == rows
    assert report["episodes"]["count"] == LANES * sum(writer.written // LENGTH for writer in writers)
    assert (report["episodes"]["length"]["min"], report["episodes"]["length"]["max"]) == (LENGTH, LENGTH)
    with Observer.connect(sidecar.name, run_dir=sidecar.run_dir) as observer:
        found = observer.read(newest=10**6)["marker"].tolist()
        (link,) = [chunk.link.tolist() for chunk in observer.chunks(1 << 20) if chunk.link is not None]
    follows = [found[after] - marker for marker, after in zip(found, link, strict=True) if after >= 0]
    assert follows == [LANES] * (rows - LANES * len(writers)), "each row leads to the next one of its lane, but the last ones"
    for writer in writers:
        writer.assert_whole(found)


@pytest.mark.parametrize(("shards", "kills"), [(1, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 30), (2, 10)))])
def test_every_row_is_in_the_ring_once_and_in_order_with_its_chains_and_sums(
    children: Children, crash_dir: Path, shards: int, kills: int
) -> None:
    rng, names = random.Random(4), ("one", "two", "three", "four")[: 2 * shards]
    with contextlib.ExitStack() as stack:
        sidecars, doors = zip(*(stack.enter_context(shard(children, crash_dir, seed)) for seed in range(shards)), strict=True)
        killer = Killer(children, crash_dir, doors, kills, seed=3)
        stack.callback(killer.close)
        options: dict[str, Any] = {"schema": SCHEMA, "lanes": LANES, "run_dir": crash_dir, "timeout": 30}
        writers = [Writer(stack.enter_context(Collector.connect("node", name=name, **options)), APART * i) for i, name in enumerate(names)]
        while not killer.is_over.is_set():
            rng.choice(writers).write(rng.randint(1, 20))
            killer.is_over.wait(rng.random() * 0.004)
        for writer in writers:
            writer.collector.flush(30)
        told = [writer.collector.statistics() for writer in writers]
        assert (killer.killed, sum(each.rows_lost for each in told)) == (kills, 0)
        assert sum(each.publishes_resumed for each in told) > kills
        places = [str(door.path) for door in doors]
        for sidecar, place in zip(sidecars, places, strict=True):
            assert_holds(sidecar, [writer for writer in writers if shard_of(writer.collector.name, places) == place])
