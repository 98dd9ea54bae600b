"""Collectors of one node over two rings: each stays with one, and what both take is committed there. No Ray between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from replay_server_client import Collector, Schema
from replay_server_client.observer import Observer
from replay_server_client.ray.carrier import ChunkCarrier
from replay_server_client.ray.host_service import HostService
from replay_server_client.ray.spread import Spread, shard_of
from replay_server_protocol.errors import InvalidRequest
from support.servers import ServerProcess

from replay_server.config import ServerConfig
from replay_server.relay import RelayServer

SCHEMA = Schema.of({"marker": ("int64", ())})


class Calls(HostService):
    """A host in this process."""

    def deliver(self, *arguments: Any) -> Future[Any]:  # type: ignore[override]
        done: Future[Any] = Future()
        done.set_result(super().deliver(*arguments))
        return done


def test_each_collector_is_pinned_to_one_shard_by_its_name() -> None:
    names = [f"collector-{i}" for i in range(1000)]
    found = [shard_of(name, ("a", "b", "c")) for name in names]
    assert found == [shard_of(name, ("a", "b", "c")) for name in names]
    assert min(found.count(shard) for shard in "abc") > 250


def test_rows_of_each_collector_are_in_one_ring(start_server: Callable[..., ServerProcess]) -> None:
    servers = {name: start_server("--capacity", "5000", "--slot-rows", "16", name=name) for name in ("g1", "g2")}
    run_dir = servers["g1"].run_dir
    calls = {name: Calls(name, str(run_dir)) for name in servers}
    spread = Spread({name: ChunkCarrier(host) for name, host in calls.items()})
    spread.start()
    node = RelayServer(ServerConfig(name="node", run_dir=str(run_dir), device="cpu"), spread)
    loop = threading.Thread(target=node.run)
    loop.start()
    try:
        for i in range(6):
            with Collector.connect("node", run_dir=run_dir, schema=SCHEMA, name=f"c{i}") as collector:
                collector.write({"marker": np.arange(100 * i, 100 * (i + 1))})
                collector.flush(20)
        pinned = {i: shard_of(f"c{i}", ("g1", "g2")) for i in range(6)}
        assert set(pinned.values()) == {"g1", "g2"}
        for name in servers:
            with Observer.connect(name, run_dir=run_dir) as observer:
                found = observer.read(newest=5000)["marker"].tolist()
            assert sorted(found) == [row for i in range(6) if pinned[i] == name for row in range(100 * i, 100 * (i + 1))]
        assert {name: counts.bytes > 0 for name, counts in spread.counts().items()} == {"g1": True, "g2": True}
    finally:
        node.ask_to_stop()
        loop.join(10)
        node.close()
        spread.close()
        for host in calls.values():
            host.close()


def test_shards_whose_slots_would_differ_are_refused_by_name(start_server: Callable[..., ServerProcess]) -> None:
    one, two = start_server("--slot-rows", "16", name="one"), start_server("--slot-rows", "32", name="two")
    calls = {server.name: Calls(server.name, str(server.run_dir)) for server in (one, two)}
    spread = Spread({name: ChunkCarrier(host) for name, host in calls.items()})
    spread.start()
    with pytest.raises(InvalidRequest, match="of one forwarder were started with different --slot-rows: 16 and 32"):
        spread.agree(SCHEMA)
    spread.close()
    for host in calls.values():
        host.close()
