"""A learner of several shards against hosts that answer at once, are lost, or come back as another ring. No Ray, no server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
from replay_server_client.ray.learner import ClusterLearner
from replay_server_client.ray.row_sampler import Drawn
from replay_server_protocol.errors import InvalidRequest, ReplayTimeout, ServerGone, ShardLost


class FakeHost:
    """``size_rows`` rows, marked from ``first`` on."""

    def __init__(self, first: int, size_rows: int) -> None:
        self.first, self.size_rows = first, size_rows
        self.generation = 1
        self.is_lost = False
        self.is_silent = False
        self.asked: list[int] = []

    def draw(self, n: int, key: Sequence[int], timeout_s: float) -> Future[Drawn]:
        self.asked.append(n)
        found: Future[Drawn] = Future()
        if self.is_lost:
            found.set_exception(ServerGone("gone"))
        elif not self.is_silent:
            seqs = np.random.default_rng(list(key)).integers(0, self.size_rows, n)
            found.set_result(Drawn(seqs, {"marker": seqs + self.first}, self.generation, self.size_rows, 1024))
        return found

    def size(self) -> Future[tuple[int, int]]:
        found: Future[tuple[int, int]] = Future()
        if self.is_lost:
            found.set_exception(ServerGone("gone"))
        else:
            found.set_result((self.generation, self.size_rows))
        return found

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
    assert learner.sample(400)["marker"].data_ptr() == batch["marker"].data_ptr()
    with pytest.raises(InvalidRequest, match="marker"):
        batch["obs"]


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
    assert sum(hosts["a"].asked) + sum(hosts["b"].asked) == 128
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
