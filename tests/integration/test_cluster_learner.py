"""A learner of several nodes with no Ray between: the services that hosts run, in this process, and real sidecars behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from replay_server_client import Collector, Schema
from replay_server_client.ray.host_service import HostService
from replay_server_client.ray.learner import ClusterLearner
from replay_server_client.ray.shard_host import LocalHost
from replay_server_client.status import query
from replay_server_protocol.errors import InvalidRequest, ShardLost
from support.markers import is_whole
from support.servers import ServerProcess
from support.shards import SIZES, Seen, start_shards

STEPS = Schema.of(shard="int64", step="int64", next_step="int64", reward="float64", terminated="bool")
Start = Callable[..., ServerProcess]
Learn = Callable[..., ClusterLearner]


@pytest.fixture
def learn() -> Iterator[Learn]:
    """``learn(servers, seed=1)``: a learner of them, closed at the end of the test."""
    made: list[ClusterLearner] = []

    def connect(servers: dict[str, ServerProcess], **options: Any) -> ClusterLearner:
        hosts = {name: LocalHost(server.name, str(server.run_dir)) for name, server in servers.items()}
        made.append(ClusterLearner(hosts, **{"prefetch": False, **options}))
        return made[-1]

    yield connect
    for learner in made:
        learner.close()


def start_steps(start: Start, *options: str) -> dict[str, ServerProcess]:
    """Two servers, each with one lane of 100 steps."""
    servers = {name: start("--capacity", "1000", "--columns", "link", *options, name=name) for name in ("s0", "s1")}
    for shard, server in enumerate(servers.values()):
        with Collector.connect(server.name, schema=STEPS, run_dir=server.run_dir) as collector:
            step = np.arange(100)
            rows = {"shard": np.full(100, shard), "step": step, "next_step": step + 1, "reward": np.ones(100)}
            collector.write(rows | {"terminated": step == 49})
            collector.flush()
    return servers


@pytest.mark.parametrize("prefetch", [False, True])
def test_three_shards_are_sampled_uniformly_over_the_union(start_server: Start, learn: Learn, prefetch: bool) -> None:
    learner, seen = learn(start_shards(start_server), seed=1, prefetch=prefetch), Seen()
    for _ in range(100):
        batch = learner.sample(1000)
        assert is_whole(batch.fields).all()
        seen.add(batch)
    assert seen.is_uniform, seen.chi_square


def test_by_priority_rows_come_by_their_share_of_all_masses_with_global_weights(start_server: Start, learn: Learn) -> None:
    """Priority of a row is 1 + its step; alpha 1. What was never given one counts as its shard's largest: so each row is given one."""
    learner = learn(start_shards(start_server, "--columns", "priority"), seed=4)
    alpha, beta, given = 1.0, 0.5, np.zeros((3, 600), bool)
    for _ in range(14):
        batch = learner.sample(2000, by="priority", alpha=0.0, beta=beta, timeout=20)
        learner.update_priorities(batch, 1.0 + batch["step"].float())
        given[batch["collector"].numpy(), batch["step"].numpy()] = True
    assert given.sum() == 1000, "every row has a priority"
    learner.sample(2000, by="priority", alpha=alpha, beta=beta)  # writes the last ones
    total = sum(size * (size + 1) / 2 for size in SIZES.values())
    counts, expected = np.zeros((3, 600)), np.zeros((3, 600))
    for _ in range(20):
        batch = learner.sample(2000, by="priority", alpha=alpha, beta=beta)
        np.add.at(counts, (batch["collector"].numpy(), batch["step"].numpy()), 1)
        priorities = 1.0 + batch["step"].numpy()
        largest = (1000 * 1.0 / total) ** -beta
        np.testing.assert_allclose(batch.weights.numpy(), (1000 * priorities / total) ** -beta / largest, rtol=1e-5)
    assert learner.router.mass == pytest.approx(total)
    for shard, size in enumerate(SIZES.values()):
        expected[shard, :size] = counts.sum() * np.arange(1, size + 1) / total
    often = expected > 5
    chi_square = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert abs(chi_square - often.sum()) < 5 * np.sqrt(2 * often.sum())
    assert learner.stale_updates(5.0) == 0


def test_n_steps_and_sequences_are_those_of_each_rings_lanes(start_server: Start, learn: Learn) -> None:
    learner = learn(start_steps(start_server))
    batch = learner.sequences(64, length=4)
    step, mask = batch["step"], batch.mask
    assert step.shape == (64, 4)
    assert (step[:, 1:] - step[:, :-1] == mask[:, 1:].long()).all()
    assert (batch["shard"] == batch.ids[:, :1]).all()
    assert (batch.ids[:, 3] == step[:, 0]).all()
    assert batch["shard"].unique().tolist() == [0, 1]
    batch = learner.sample(512, n_step=3, gamma=0.5)
    assert set(batch.n_steps.tolist()) == {1, 2, 3}
    assert (batch["next_step"] == batch["step"] + batch.n_steps).all()
    assert (batch["reward"] == 2 - 0.5 ** (batch.n_steps.double() - 1)).all()
    assert (batch.bootstrap == 0.5**batch.n_steps * ~batch["terminated"]).all()
    batch = learner.sample(512)
    assert (batch.bootstrap == 0.99 * ~batch["terminated"]).all()


def test_only_rows_that_were_sent_count_as_sampled(start_server: Start, learn: Learn) -> None:
    servers = start_steps(start_server)
    learner = learn(servers)
    for _ in range(5):
        learner.sample(64, n_step=3)
        learner.sample(64)
    reports: list[Any] = [query(server.endpoints) for server in servers.values()]
    assert sum(report["flow"]["sampled_rows"] for report in reports) == 2 * 5 * 64


def test_a_column_that_a_ring_does_not_keep_is_named(start_server: Start, learn: Learn) -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        learn(start_steps(start_server)).sample(8, by="priority")


class DyingHost(LocalHost):
    """``restart``: forgets all it knew, as a host that was killed and started again."""

    def restart(self) -> None:
        known = self._service.report()
        self._service.close()
        self._service = HostService(str(known["server"]), str(known["run_dir"]))


def test_priorities_for_a_host_that_forgot_the_batch_are_counted_as_stale_and_draws_go_on(start_server: Start) -> None:
    server = start_steps(start_server, "--columns", "link,priority")["s0"]
    host = DyingHost(server.name, str(server.run_dir))
    with ClusterLearner({"s0": host}, prefetch=False) as learner:
        batch = learner.sample(32, by="priority")
        host.restart()
        learner.update_priorities(batch, [1.0] * 32)
        assert learner.stale_updates(5.0) == 32
        learner.update_priorities(learner.sample(32, by="priority"), [1.0] * 32)
        assert learner.stale_updates(5.0) == 32


def test_a_lost_sidecars_share_comes_from_the_rest_and_priorities_for_it_are_stale(start_server: Start, learn: Learn) -> None:
    servers = start_steps(start_server, "--columns", "link,priority")
    learner = learn(servers)
    batch = learner.sample(64, by="priority")
    mine = batch.counts.rows[1]
    servers["s1"].stop()
    after = learner.sample(64, by="priority")
    assert after.counts.rows == (64, 0)
    assert after.epoch > batch.epoch
    assert learner.sample(64, n_step=2)["shard"].unique().tolist() == [0]
    with pytest.raises(InvalidRequest, match="ended with the next"):
        learner.update_priorities(batch, [1.0] * 64)
    assert mine > 0
    servers["s0"].stop()
    with pytest.raises(ShardLost, match="no shard is left"):
        learner.sample(64, by="priority")
