"""Batches of several rings over Ray: uniform over the union, before and after a sidecar, an actor and a node are lost."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replay_server_client import Collector
from replay_server_protocol.schema import Schema
from support.servers import ServerProcess

pytestmark = pytest.mark.slow  # minutes, with all of a cluster for themselves: scripts/test ray
SCHEMA = Schema.of({"marker": ("int64", ())})
SIZES = {"one": 100, "two": 300, "three": 600}


def filled(sidecars: Callable[..., ServerProcess], first: int, n: int) -> ServerProcess:
    sidecar = sidecars("--capacity", "40000", "--slot-rows", "50")
    with Collector.connect(sidecar.name, run_dir=sidecar.run_dir, schema=SCHEMA) as collector:
        collector.write({"marker": np.arange(first, first + n)})
        collector.flush()
    return sidecar


@pytest.fixture
def shards(ray_nodes: Any, sidecars: Callable[..., ServerProcess]) -> dict[str, ServerProcess]:
    """Three sidecars of 100, 300 and 600 marker rows; hosts on two nodes, the third of its own."""
    from replay_server_client.ray.cluster import start_host

    ids = {name: ray_nodes.add(f"gpu-{name}") for name in SIZES if f"gpu-{name}" not in ray_nodes.nodes}
    started, first = {}, 0
    for name, n in SIZES.items():
        started[name] = filled(sidecars, first, n)
        start_host(name, server=started[name].name, run_dir=started[name].run_dir, node_id=ids[name])
        first += n
    return started


def chi_square(counts: Counter[int], rows: range) -> float:
    """In standard deviations from its mean, for the hypothesis that every row is equally likely."""
    found = np.array([counts[row] for row in rows], np.float64)
    expected = found.sum() / len(found)
    return float((((found - expected) ** 2 / expected).sum() - (len(found) - 1)) / np.sqrt(2 * (len(found) - 1)))


def drawn(learner: Any, batches: int, n: int) -> Counter[int]:
    counts: Counter[int] = Counter()
    for _ in range(batches):
        batch = learner.sample(n, timeout=30)
        assert (batch["marker"] - batch.ids[:, 3] == np.array([0, 100, 400])[batch.ids[:, 0]]).all()
        counts.update(batch["marker"].tolist())
    return counts


def draw_until_all_take_part(learner: Any, but: str = "") -> None:
    """All shards but ``but``; for half a minute at most."""
    end, awaited = time.monotonic() + 30, tuple(shard for shard in SIZES if shard != but)
    while learner.router.taking_part != awaited and time.monotonic() < end:
        drawn(learner, 1, 500)
    assert learner.router.taking_part == awaited


@pytest.mark.timeout(300)
def test_draws_are_uniform_over_the_union_and_stay_so_as_sidecar_actor_and_node_are_lost(
    ray_nodes: Any, shards: dict[str, ServerProcess], sidecars: Callable[..., ServerProcess]
) -> None:
    import ray
    from replay_server_client.ray.cluster import connect_learner, start_host
    from replay_server_client.ray.survey import status

    with connect_learner(list(SIZES), seed=3, prefetch=False) as learner:
        learner.wait_ready(30)
        assert abs(chi_square(drawn(learner, 50, 20_000), range(1000))) < 4  # 10^6 draws
        assert learner.router.epoch == 1 or learner.router.taking_part == tuple(SIZES)

        found: Any = status()
        assert {name: host["state"] for name, host in found["hosts"].items()} == dict.fromkeys(SIZES, "up")

        epoch = learner.router.epoch
        host = ray.get_actor("replay-host:two", namespace="replay")
        os.kill(ray.get(host.report.remote())["pid"], 9)  # an actor: its ring survives, and it comes back
        drawn(learner, 1, 5000)
        draw_until_all_take_part(learner)
        assert learner.router.epoch >= epoch + 2
        assert abs(chi_square(drawn(learner, 10, 20_000), range(1000))) < 4

        shards["one"].kill()  # a sidecar: its rows are lost
        after = drawn(learner, 10, 20_000)
        assert min(after) >= 100
        assert abs(chi_square(after, range(100, 1000))) < 4
        found = status()
        assert found["hosts"]["one"]["state"] == "down"

        ray_nodes.remove("gpu-three")  # a node
        began = time.monotonic()
        drawn(learner, 1, 1000)
        took_s = time.monotonic() - began
        after = drawn(learner, 10, 20_000)
        assert max(after) < 400
        assert min(after) >= 100
        assert abs(chi_square(after, range(100, 400))) < 4
        print(f"the draw that met the lost node took {took_s:.2f} s")
        assert learner.losses == 3

        successor = filled(sidecars, 400, 600)  # of that shard on a new node
        start_host("three", server=successor.name, run_dir=successor.run_dir, node_id=ray_nodes.add("gpu-next"))
        draw_until_all_take_part(learner, but="one")
        assert abs(chi_square(drawn(learner, 10, 20_000), range(100, 1000))) < 4

    with connect_learner(["two", "one"], on_loss="raise", prefetch=False) as strict, pytest.raises(TimeoutError, match="one"):
        strict.sample(8, timeout=3)


@pytest.mark.timeout(120)
def test_a_shard_that_fills_is_drawn_from_in_proportion_and_one_here_directly(
    ray_nodes: Any, sidecars: Callable[..., ServerProcess]
) -> None:
    from replay_server_client.ray.cluster import connect_learner, start_host

    node = ray_nodes.add("gpu-filling")
    full, filling = filled(sidecars, 0, 500), filled(sidecars, 500, 50)
    start_host("filling", server=filling.name, run_dir=filling.run_dir, node_id=node)
    with (
        connect_learner(["full", "filling"], local={"full": (full.name, str(full.run_dir))}, prefetch=False) as learner,
        Collector.connect(filling.name, run_dir=filling.run_dir, schema=SCHEMA) as collector,
    ):
        for step in range(9):
            batch = learner.sample(1000, timeout=20)
            assert set(batch.sizes) == {"full", "filling"}
            collector.write({"marker": np.arange(550 + 50 * step, 600 + 50 * step)})
            collector.flush()
        learner.sample(1000)  # tells the router the last size
        counts: Counter[int] = Counter()
        for _ in range(20):
            batch = learner.sample(10_000)
            assert batch.sizes == {"full": 500, "filling": 500}
            counts.update(batch["marker"].tolist())
    assert abs(chi_square(counts, range(1000))) < 4
