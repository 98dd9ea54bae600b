"""One learner of several servers: the union is sampled as one ring, by every mode, also while a shard fills."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from replay_server_client import Collector, InvalidRequest, MultiLearner, ReplayTimeout, Schema, SchemaMismatch, ServerGone
from support.markers import MARKERS, is_whole, marker_steps
from support.servers import ServerProcess
from support.shards import SIZES, Seen, fill, run_dir_of, start_shards

WALKED = Schema.of(shard="int64", step="int64", next_step="int64", reward="float64", terminated="bool")
Start = Callable[..., ServerProcess]


def seen_in(learner: MultiLearner, batches: int, n: int = 500) -> Seen:
    seen = Seen()
    for _ in range(batches):
        batch = learner.sample(n)
        assert is_whole(batch.fields).all()
        seen.add(batch)
    return seen


@pytest.mark.parametrize("batches", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_three_shards_are_sampled_uniformly_over_the_union(start_server: Start, batches: int) -> None:
    servers = start_shards(start_server)
    with MultiLearner.connect(list(servers), device="cpu", run_dir=run_dir_of(servers), seed=1, prefetch=2) as learner:
        seen = seen_in(learner, batches)
        assert seen.is_uniform, seen.chi_square
        rows = learner.statistics().rows
        assert sum(rows.values()) == batches * 500
        assert learner.router.size_rows == 1000


@pytest.mark.parametrize("batches", [120, pytest.param(2000, marks=pytest.mark.slow)])
def test_while_a_shard_fills_every_batch_is_uniform_over_what_it_was_drawn_from(start_server: Start, batches: int) -> None:
    servers = start_shards(start_server, sizes={**SIZES, "s2": 8})
    run_dir = run_dir_of(servers)
    with (
        Collector.connect("s2", schema=MARKERS, run_dir=run_dir) as collector,
        MultiLearner.connect(list(servers), device="cpu", run_dir=run_dir, seed=2, prefetch=1) as learner,
    ):
        seen, sizes, step = Seen(), set(), 8
        for number in range(batches):
            if step < 600 and number % max(1, batches // 74) == 0:
                collector.write(marker_steps(2, 1, step, 8))
                collector.flush()
                step += 8
            batch = learner.sample(500)
            sizes.add(batch.counts.sizes[2])
            seen.add(batch)
        assert len(sizes) > 20, "the shard grew while it was sampled from"
        assert seen.is_uniform, seen.chi_square
        assert learner.router.epoch == 3, "what only grows is no new membership"


def test_stratified_counts_are_fixed_and_local_takes_its_own(start_server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = start_shards(start_server)
    run_dir = run_dir_of(servers)
    with MultiLearner.connect(list(servers), mode="stratified", device="cpu", run_dir=run_dir) as learner:
        counts = {learner.sample(50).counts.rows for _ in range(5)}
        assert counts == {(5, 15, 30)}
    monkeypatch.setenv("LOCAL_RANK", "1")
    with MultiLearner.connect(list(servers), mode="local", device="cpu", run_dir=run_dir) as learner:
        batch = learner.sample(50)
        assert batch["collector"].unique().tolist() == [1]
        assert list(learner.statistics().shards) == ["s1"]
    with MultiLearner.connect(list(servers), mode="local", own="s{local_rank}", device="cpu", run_dir=run_dir) as learner:
        assert list(learner.statistics().shards) == ["s1"]


def test_ids_name_shard_generation_index_and_seq(start_server: Start) -> None:
    servers = start_shards(start_server)
    with MultiLearner.connect(list(servers), device="cpu", run_dir=run_dir_of(servers)) as learner:
        batch = learner.sample(200)
        ids = batch.ids.numpy()
        assert (ids[:, 0] == batch["collector"].numpy()).all()
        assert (ids[:, 3] == batch["step"].numpy()).all()
        assert (ids[:, 2] == ids[:, 3]).all()
        for shard, generation in enumerate(batch.counts.generations):
            assert set(ids[ids[:, 0] == shard, 1]) <= {generation}
        groups = learner.router.groups(ids)
        assert (sum(map(len, groups.places)), groups.stale) == (200, 0)


def test_batches_have_two_addresses_and_end_with_the_next_sample(start_server: Start) -> None:
    servers = start_shards(start_server)
    with MultiLearner.connect(list(servers), device="cpu", run_dir=run_dir_of(servers)) as learner:
        addresses = [learner.sample(64)["check"].data_ptr() for _ in range(6)]
        assert len(set(addresses)) == 2
        assert addresses[:2] * 3 == addresses
        batch = learner.sample(64)
        learner.sample(64)
        with pytest.raises(InvalidRequest, match="ended with the next"):
            batch.ids  # noqa: B018


def test_by_priority_rows_come_by_their_share_of_all_masses_with_global_weights(start_server: Start) -> None:
    """Priority of a row is 1 + its step; alpha 1. What was never given one counts as its shard's largest: so each row is given one."""
    servers = start_shards(start_server, "--columns", "priority")
    alpha, beta = 1.0, 0.5
    with MultiLearner.connect(list(servers), device="cpu", run_dir=run_dir_of(servers), seed=4, prefetch=0) as learner:
        given = np.zeros((3, 600), bool)
        for _ in range(14):
            batch = learner.sample(2000, by="priority", alpha=0.0, beta=beta, timeout=20)
            learner.update_priorities(batch, 1.0 + batch["step"].to(torch.float32))
            given[batch["collector"].numpy(), batch["step"].numpy()] = True
        assert given.sum() == 1000, "every row has a priority"
        learner.sample(2000, by="priority", alpha=alpha, beta=beta)  # writes the last ones
        total = sum(size * (size + 1) / 2 for size in SIZES.values())
        counts = np.zeros((3, 600))
        for _ in range(20):
            batch = learner.sample(2000, by="priority", alpha=alpha, beta=beta)
            np.add.at(counts, (batch["collector"].numpy(), batch["step"].numpy()), 1)
            priorities = 1.0 + batch["step"].numpy()
            largest = (1000 * 1.0 / total) ** -beta
            np.testing.assert_allclose(batch.weights.numpy(), (1000 * priorities / total) ** -beta / largest, rtol=1e-5)
        assert learner.router.mass == pytest.approx(total)
        assert learner.router.least == 1.0
        expected = np.zeros((3, 600))
        for shard, size in enumerate(SIZES.values()):
            expected[shard, :size] = counts.sum() * np.arange(1, size + 1) / total
        often = expected > 5
        chi_square = ((counts - expected)[often] ** 2 / expected[often]).sum()
        assert abs(chi_square - often.sum()) < 5 * np.sqrt(2 * often.sum())
        assert learner.statistics().stale_updates == 0


def test_where_no_row_has_a_priority_the_union_is_uniform_with_weights_of_one(start_server: Start) -> None:
    servers = start_shards(start_server, "--columns", "priority")
    with MultiLearner.connect(list(servers), device="cpu", run_dir=run_dir_of(servers), prefetch=0) as learner:
        for _ in range(14):
            batch = learner.sample(2000, by="priority", timeout=20)
            learner.update_priorities(batch, torch.zeros(2000))
        learner.sample(2000, by="priority")
        seen = Seen()
        for _ in range(8):
            batch = learner.sample(2000, by="priority")
            assert (batch.weights == 1).all()
            seen.add(batch)
        assert learner.router.mass == 0
        assert seen.is_uniform


def test_sequences_and_n_steps_come_from_the_union(start_server: Start) -> None:
    names, run_dir = ["s0", "s1"], None
    for shard, name in enumerate(names):
        run_dir = start_server("--capacity", "1000", "--columns", "link", name=name).run_dir
        with Collector.connect(name, schema=WALKED, run_dir=run_dir) as collector:
            zeros = np.zeros(100)
            rows = {
                "shard": np.full(100, shard),
                "step": np.arange(100),
                "next_step": np.arange(100) + 1,
                "reward": zeros + 1.0,
                "terminated": zeros.astype(bool),
            }
            collector.write(rows)
            collector.flush()
    with MultiLearner.connect(names, device="cpu", run_dir=run_dir) as learner:
        batch = learner.sequences(64, length=4)
        assert batch["step"].shape == (64, 4)
        assert (batch["step"][:, 1:] - batch["step"][:, :-1] == batch.mask[:, 1:].long()).all()
        assert (batch["shard"] == batch["shard"][:, :1]).all()
        assert batch["shard"].unique().tolist() == [0, 1]
        assert set(learner.sample(64, n_step=3).n_steps.tolist()) <= {1, 2, 3}


def test_readiness_waits_for_each_floor_and_the_sum_and_names_what_is_missing(start_server: Start) -> None:
    servers = start_shards(start_server, sizes={"s0": 100, "s1": 0})
    run_dir = run_dir_of(servers)
    with MultiLearner.connect(["s0", "s1"], device="cpu", run_dir=run_dir, floor_rows=(1, 50), min_size=160) as learner:
        with pytest.raises(ReplayTimeout, match="'s1' has 0"):
            learner.sample(8, timeout=0.3)
        fill(servers["s1"], 1, 0, 50)
        with pytest.raises(ReplayTimeout, match="need 160 rows over all shards, have 150"):
            learner.wait_ready(timeout=0.5)
        fill(servers["s1"], 1, 50, 10)
        begun = time.monotonic()
        assert len(learner.sample(8)) == 8
        assert time.monotonic() - begun < 2


def test_a_server_that_is_missing_at_the_start_is_named(start_server: Start) -> None:
    servers = start_shards(start_server, sizes={"s0": 10})
    with pytest.raises(ServerGone, match="absent"):
        MultiLearner.connect(["s0", "absent"], device="cpu", run_dir=run_dir_of(servers), timeout=0.3)


def test_shards_of_different_rows_are_refused_by_name(start_server: Start) -> None:
    servers = start_shards(start_server, sizes={"s0": 10})
    other = start_server("--capacity", "1000", name="other")
    with Collector.connect("other", schema=Schema.of(mark="int64"), run_dir=other.run_dir) as collector:
        collector.write({"mark": np.arange(10)})
        collector.flush()
    with (
        MultiLearner.connect(["s0", "other"], mode="stratified", device="cpu", run_dir=run_dir_of(servers)) as learner,
        pytest.raises(SchemaMismatch, match="mark"),
    ):
        learner.sample(10)


def test_what_can_not_be_right_over_several_shards_is_refused(start_server: Start) -> None:
    servers = start_shards(start_server, sizes={"s0": 10, "s1": 10})
    run_dir = run_dir_of(servers)
    with MultiLearner.connect(["s0", "s1"], device="cpu", run_dir=run_dir) as learner:
        with pytest.raises(InvalidRequest, match="half_life_rows"):
            learner.sample(5, half_life_rows=3.0)
        with pytest.raises(InvalidRequest, match="by='priority'"):
            learner.update_priorities(learner.sample(5), [1.0] * 5)
    with pytest.raises(InvalidRequest, match="a list of names"):
        MultiLearner.connect("s0", run_dir=run_dir)
    with pytest.raises(InvalidRequest, match="LOCAL_RANK"):
        MultiLearner.connect(["s0", "s1"], mode="local", run_dir=run_dir)
