"""A learner of several shards against hosts that answer at once, are lost, or come back as another ring. No Ray, no server."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from replay_server_client.ray.learner import ClusterLearner
from replay_server_client.ray.parcel import Asked, Drawn, Priorities
from replay_server_client.request import Request
from replay_server_protocol.errors import InvalidRequest, ReplayTimeout, SchemaMismatch, ServerGone, ShardLost
from replay_server_protocol.schema import Schema

SCHEMA = Schema.of({"marker": ("int64", ())})


class FakeHost:
    """``size_rows`` rows, marked from ``first`` on; each of priority ``priority``."""

    def __init__(self, first: int, size_rows: int, priority: float = 1.0) -> None:
        self.first, self.size_rows, self.priority = first, size_rows, priority
        self.generation = 1
        self.is_lost = False
        self.is_silent = False
        self.schema = SCHEMA
        self.asked: list[Asked] = []
        self.told: list[Priorities] = []
        self.stale = 0

    def draw(self, asked: Asked, timeout_s: float) -> Future[Drawn]:
        self.asked.append(asked)
        found: Future[Drawn] = Future()
        if self.is_lost:
            found.set_exception(ServerGone("gone"))
        elif not self.is_silent:
            found.set_result(self._drawn(asked))
        return found

    def _drawn(self, asked: Asked) -> Drawn:
        seqs = np.random.default_rng(asked.key).integers(0, self.size_rows, asked.draws)
        rows = np.zeros((len(seqs), self.schema.stride), np.uint8)
        rows[:, :8] = (seqs + self.first).reshape(-1, 1).view(np.uint8)
        results: dict[str, Any] = {"seqs": seqs, "indices": seqs % 1024}
        drawn = Drawn(rows, results, self.schema.to_wire(), self.generation, self.size_rows)
        if not asked.request["tells_mass"]:
            return drawn
        results |= {"masses": np.full(len(seqs), self.priority), "weights": np.ones(len(seqs), np.float32)}
        return drawn._replace(mass=self.size_rows * self.priority, least=self.priority, beta=0.4, number=len(self.asked))

    def write(self, told: Priorities) -> Future[int]:
        self.told.append(told)
        found: Future[int] = Future()
        found.set_result(self.stale)
        return found

    def size(self) -> Future[tuple[int, int]]:
        found: Future[tuple[int, int]] = Future()
        if self.is_lost:
            found.set_exception(ServerGone("gone"))
        else:
            found.set_result((self.generation, self.size_rows))
        return found

    def leave(self, learner: str) -> None:
        assert not self.asked or learner == self.asked[0].learner

    def close(self) -> None:
        self.is_silent = True


@pytest.fixture
def hosts() -> dict[str, FakeHost]:
    return {"a": FakeHost(0, 100), "b": FakeHost(1000, 300)}


def test_rows_come_from_each_shard_as_counted_and_carry_their_ids(hosts: dict[str, FakeHost]) -> None:
    learner = ClusterLearner(hosts, prefetch=False)
    batch = learner.sample(400)
    assert batch.counts.rows == (int((batch.ids[:, 0] == 0).sum()), int((batch.ids[:, 0] == 1).sum()))
    assert (batch["marker"] == batch.ids[:, 3] + 1000 * batch.ids[:, 0]).all()
    assert (batch.ids[:, 1] == 1).all()
    assert batch.sizes == {"a": 100, "b": 300}
    with pytest.raises(InvalidRequest, match="marker"):
        batch["obs"]
    address = batch["marker"].data_ptr()
    assert learner.sample(400)["marker"].data_ptr() == address
    with pytest.raises(InvalidRequest, match="ended with the next"):
        batch["marker"]


def test_rows_a_lost_shard_owes_come_from_the_rest_and_a_new_ring_joins_by_its_size(hosts: dict[str, FakeHost]) -> None:
    learner = ClusterLearner(hosts, prefetch=False, floor_rows=50)
    epoch = learner.sample(64).epoch
    hosts["a"].is_lost = True
    batch = learner.sample(64)
    assert batch.counts.rows == (0, 64)
    assert batch.epoch == epoch + 1
    assert (batch.ids[:, 0] == 1).all()
    hosts["a"].is_lost, hosts["a"].generation, hosts["a"].size_rows = False, 2, 10
    learner._look_at_s["a"] = 0.0
    for _ in range(3):
        assert learner.sample(64).counts.rows == (0, 64)  # below its floor
        learner._look_at_s["a"] = 0.0
    hosts["a"].size_rows = 100
    for _ in range(3):
        batch = learner.sample(64)
        learner._look_at_s["a"] = 0.0
    assert batch.counts.rows[0] > 0
    assert set(batch.ids[batch.ids[:, 0] == 0][:, 1].tolist()) == {2}


def test_a_ring_that_was_replaced_between_count_and_draw_counts_as_lost(hosts: dict[str, FakeHost]) -> None:
    learner = ClusterLearner(hosts, prefetch=False)
    learner.sample(64)
    hosts["a"].generation = 2
    assert learner.sample(64).counts.rows == (0, 64)
    assert learner.losses == 1


def test_with_prefetch_the_next_batch_is_asked_for_when_one_is_returned(hosts: dict[str, FakeHost]) -> None:
    learner = ClusterLearner(hosts)
    learner.sample(64)
    assert sum(asked.draws for host in hosts.values() for asked in host.asked) == 128
    hosts["a"].is_lost = hosts["b"].is_lost = True
    assert len(learner.sample(64)) == 64  # was on its way
    with pytest.raises(ShardLost):
        learner.sample(64)
    learner.close()


def test_a_loss_is_raised_where_asked_for(hosts: dict[str, FakeHost]) -> None:
    learner = ClusterLearner(hosts, prefetch=False, on_loss="raise")
    learner.sample(64)
    hosts["b"].is_lost = True
    with pytest.raises(ShardLost, match="'b'"):
        learner.sample(64)


def test_a_shard_that_does_not_answer_is_named(hosts: dict[str, FakeHost]) -> None:
    learner = ClusterLearner(hosts, prefetch=False)
    learner.sample(64)
    hosts["b"].is_silent = True
    with pytest.raises(ReplayTimeout, match="shard 'b' has not answered"):
        learner.sample(64, timeout=0.05)
    hosts["b"].is_silent = False
    assert len(learner.sample(64)) == 64


def test_a_batch_asked_for_ahead_that_came_too_late_is_asked_for_again_in_the_next_call(hosts: dict[str, FakeHost]) -> None:
    learner = ClusterLearner(hosts)
    hosts["a"].is_silent = True
    with pytest.raises(ReplayTimeout):
        learner.sample(64, timeout=0.01)
    hosts["a"].is_silent = False
    learner.sample(64)
    late: Future[Drawn] = Future()
    late.set_exception(ReplayTimeout("not granted"))
    ahead = next(iter(learner._samplers.values()))._ahead
    assert ahead is not None
    ahead.futures[0] = late
    assert len(learner.sample(64)) == 64


def test_by_priority_shares_are_those_of_the_masses_and_weights_those_of_the_least_in_any_shard(hosts: dict[str, FakeHost]) -> None:
    hosts["a"].priority, hosts["b"].priority = 6.0, 1.0  # masses 600 and 300
    learner = ClusterLearner(hosts, prefetch=False, seed=5)
    batch = learner.sample(3000, by="priority", beta=0.5)
    assert abs(batch.counts.rows[0] - 2000) < 5 * np.sqrt(3000 * 2 / 9), "also in the first batch: masses are asked for before"
    assert [asked.draws for asked in hosts["a"].asked] == [0, batch.counts.rows[0]]
    weights = np.where(batch.ids[:, 0].numpy() == 0, 6.0**-0.5, 1.0)
    np.testing.assert_allclose(batch.weights.numpy(), weights, rtol=1e-6)


def test_a_shard_without_any_priority_is_drawn_from_no_more_than_its_mass_says(hosts: dict[str, FakeHost]) -> None:
    hosts["a"].priority = 0.0
    learner = ClusterLearner(hosts, prefetch=False)
    assert learner.sample(64, by="priority").counts.rows == (0, 64)
    assert learner.sample(64).counts.rows[0] > 0, "uniform draws go on by sizes"
    hosts["a"].priority = 1.0
    learner.sample(64, by="priority", alpha=1.0)  # of another alpha: masses are asked for again
    assert learner.sample(64, by="priority").counts.rows[0] > 0


def test_priorities_go_back_to_the_shard_of_each_row_and_late_ones_are_counted(hosts: dict[str, FakeHost]) -> None:
    learner = ClusterLearner(hosts, prefetch=False)
    batch = learner.sample(64, by="priority")
    learner.update_priorities(batch, np.arange(64.0).tolist())
    (a,), (b,) = hosts["a"].told, hosts["b"].told
    assert [*a.values, *b.values] == list(range(64))
    assert (len(a.values), len(b.values)) == batch.counts.rows
    assert learner.stale_updates() == 0
    hosts["a"].stale = 5
    learner.update_priorities(batch, [1.0] * 64)
    learner.router.lose("b")
    learner.update_priorities(batch, [1.0] * 64)
    assert learner.stale_updates() == 10 + batch.counts.rows[1]
    assert len(hosts["b"].told) == 2
    with pytest.raises(InvalidRequest, match="one for each of 64"):
        learner.update_priorities(batch, [1.0])
    with pytest.raises(InvalidRequest, match="by='priority'"):
        learner.update_priorities(learner.sample(8), [1.0] * 8)


def test_what_a_host_refused_is_raised_once_and_the_answers_behind_it_still_count(hosts: dict[str, FakeHost]) -> None:
    learner = ClusterLearner(hosts, prefetch=False)
    refused: Future[int] = Future()
    refused.set_exception(InvalidRequest("refused by the host"))
    hosts["b"].stale = 3
    learner._updates.append((refused, 1))
    learner.update_priorities(learner.sample(64, by="priority"), [1.0] * 64)
    with pytest.raises(InvalidRequest, match="refused by the host"):
        learner.stale_updates()
    assert learner.stale_updates() == 3


def test_what_is_not_there_over_several_nodes_is_refused_by_name(hosts: dict[str, FakeHost]) -> None:
    learner = ClusterLearner(hosts)
    with pytest.raises(InvalidRequest, match="max_age_rows"):
        learner.sample(8, max_age_rows=10)
    with pytest.raises(InvalidRequest, match="half_life_rows"):
        learner.sample(8, half_life_rows=10.0)
    with pytest.raises(InvalidRequest, match="alpha and beta"):
        learner.sample(8, alpha=1.0)
    with pytest.raises(InvalidRequest, match="device='mps'"):
        ClusterLearner(hosts, device="mps")


@pytest.mark.parametrize(
    "request_",
    [
        Request.transitions(8),
        Request.transitions(8, n_step=2),
        Request.transitions(8, by="priority"),
        Request.transitions(8, half_life_rows=3.0),
        Request.sequences(8, length=1, burn_in=0, stride=1, crosses_episodes=False),
    ],
)
def test_a_host_knows_a_plain_request_without_its_class(request_: Request) -> None:
    assert Asked("me", asdict(request_), 0, 8, (1, 2, 3)).is_plain is request_.is_plain


def test_shards_of_two_schemas_are_refused(hosts: dict[str, FakeHost]) -> None:
    hosts["b"].schema = Schema.of({"other": ("int64", ())})
    with pytest.raises(SchemaMismatch, match="other"):
        ClusterLearner(hosts, prefetch=False).sample(64)
