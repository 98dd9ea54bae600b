"""The slice of these tests that every change runs: a collector on one node, its ring on another, a learner of that ring and of one here."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from replay_server_client import Collector
from replay_server_client.observer import Observer
from replay_server_protocol.errors import InvalidRequest, SchemaMismatch
from replay_server_protocol.schema import Schema
from support.servers import ServerProcess

SCHEMA = Schema.of({"marker": ("int64", ()), "next_marker": ("int64", ()), "reward": ("float32", ()), "terminated": ("bool", ())})
ROWS, PUBLISHES = 16, 60
KILLS = {10: "host", 30: "forwarder", 50: "host"}
OPTIONS = ("--capacity", "5000", "--slot-rows", str(ROWS), "--columns", "link,priority")


def rows(first: int, n: int) -> dict[str, np.ndarray[Any, Any]]:
    marker = np.arange(first, first + n)
    return {"marker": marker, "next_marker": marker + 1, "reward": np.ones(n, np.float32), "terminated": np.zeros(n, bool)}


@pytest.fixture(scope="module")
def away(sidecars: Callable[..., ServerProcess], ray_nodes: Any) -> tuple[ServerProcess, Any]:
    """A sidecar on another node, and its host there, which ends first."""
    from replay_server_client.ray.cluster import start_host

    sidecar = sidecars(*OPTIONS)
    return sidecar, start_host("away", server=sidecar.name, run_dir=sidecar.run_dir, node_id=ray_nodes.add("away"))


def killed(actor: Any) -> None:
    """kill -9 of the actor's process, once it answers."""
    import ray

    while True:
        with contextlib.suppress(ray.exceptions.RayError):
            os.kill(ray.get(actor.report.remote(), timeout=5)["pid"], 9)
            return
        time.sleep(0.02)


def test_every_publish_is_committed_once_though_host_and_forwarder_are_killed(away: tuple[ServerProcess, Any]) -> None:
    import ray
    from replay_server_client.ray.cluster import start_forwarder

    sidecar, host = away
    forwarder = start_forwarder("away", name="here", run_dir=sidecar.run_dir, chunk_bytes=1)
    with Collector.connect("here", run_dir=sidecar.run_dir, schema=SCHEMA, timeout=60) as collector:
        for publish in range(PUBLISHES):
            collector.write(rows(ROWS * publish, ROWS), timeout=60)
            if publish in KILLS:
                killed(host if KILLS[publish] == "host" else forwarder)
        collector.flush(60)
        assert collector.statistics().rows_lost == 0
    with Observer.connect(sidecar.name, run_dir=sidecar.run_dir) as observer:
        assert observer.read(newest=5000)["marker"].tolist() == list(range(ROWS * PUBLISHES))
    report = ray.get(forwarder.report.remote())["shards"]["away"]
    assert report["failures"] > 0
    with pytest.raises(SchemaMismatch, match="marker"):
        Collector.connect("here", run_dir=sidecar.run_dir, schema=Schema.of({"marker": ("int32", ())}))
    ray.get(forwarder.stop.remote())


def test_batches_come_from_the_rings_of_two_nodes_by_size_by_priority_and_in_steps(
    away: tuple[ServerProcess, Any], sidecars: Callable[..., ServerProcess]
) -> None:
    from replay_server_client.ray.cluster import connect_learner
    from replay_server_client.ray.survey import status

    here = sidecars(*OPTIONS)
    with Collector.connect(here.name, run_dir=here.run_dir, schema=SCHEMA) as collector:
        collector.write(rows(1000, 240))
        collector.flush()
    with connect_learner(["here", "away"], local={"here": (here.name, str(here.run_dir))}, seed=3) as learner:
        learner.wait_ready(30)
        counts = np.zeros(1240)
        for _ in range(20):
            batch = learner.sample(6000, timeout=30)
            np.add.at(counts, batch["marker"].numpy(), 1)
        counts = np.concatenate([counts[: ROWS * PUBLISHES], counts[1000:]])
        chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert abs(chi_square - len(counts)) < 5 * np.sqrt(2 * len(counts))

        for _ in range(30):  # of the rows away all but the first hundred become a thousand times as likely
            batch = learner.sample(1000, by="priority", alpha=1.0, beta=1.0, timeout=30)
            is_likely = (batch["marker"] >= 100) & (batch["marker"] < 1000)
            learner.update_priorities(batch, torch.where(is_likely, 1.0, 0.001))
        assert batch.counts.rows[1] > 900
        torch.testing.assert_close(batch.weights[is_likely], torch.full((int(is_likely.sum()),), 0.001))
        assert learner.stale_updates(10) == 0

        batch = learner.sample(256, n_step=3, gamma=0.5, timeout=30)
        assert (batch["next_marker"] == batch["marker"] + batch.n_steps).all()
        assert learner.sequences(16, length=4, timeout=30)["marker"].shape == (16, 4)
    with connect_learner(["away"]) as alone, pytest.raises(InvalidRequest, match="above the capacity of 5,000"):
        alone.sample(10_000, timeout=30)
    with pytest.raises(InvalidRequest, match="transport='rdt'"):
        connect_learner(["away"], transport="rdt")
    found: Any = status()
    assert found["hosts"]["away"]["state"] == "up"
