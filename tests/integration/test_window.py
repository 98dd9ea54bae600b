"""What can be sampled: exactly the newest capacity rows, uniformly, and the same ones for equal seeds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from replay_server_client import Collector, InvalidRequest, Learner, Schema
from support.raw_client import RawLearner
from support.reports import assert_conserved, report_of
from support.servers import ServerProcess

SCHEMA = Schema.of(mark="int64")
CAPACITY = 37
CHI_SQUARE_LIMIT = 148.23
"""99.9th percentile of chi-square with 99 degrees of freedom."""


def marks(first: int, end: int) -> dict[str, object]:
    return {"mark": np.arange(first, end)}


@pytest.mark.parametrize("chunk", [1, 5, 16, 23])
def test_exactly_the_newest_capacity_rows_can_be_sampled(start_server: Callable[..., ServerProcess], chunk: int) -> None:
    server = start_server("--capacity", str(CAPACITY), "--slot-rows", "8", "--headroom", "16")
    counts = (1, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY, 5 * CAPACITY + 11)
    written = 0
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=0) as learner,
        RawLearner(server.endpoints) as raw,
    ):
        for number, count in enumerate(counts, 1):
            while written < count:
                n = min(chunk, count - written)
                collector.write(marks(written, written + n))
                written += n
            assert collector.flush() == count
            oldest = max(0, count - CAPACITY)
            grant, values = raw.window(number, "mark", min_committed=count)
            assert (grant.tail, grant.committed) == (oldest, count)
            assert values.tolist() == list(range(oldest, count))
            found = set()
            for _ in range(20):
                batch = learner.sample(CAPACITY, min_committed=count)
                assert batch.window == (oldest, count)
                assert torch.equal(batch["mark"], batch.seqs)
                found |= set(batch.seqs.tolist())
            assert found == set(range(oldest, count)), "20 batches of the capacity miss a row once in 10^7 runs"
    assert_conserved(report_of(server))


@pytest.mark.parametrize("capacity", [1, 2])
def test_the_smallest_rings_keep_their_newest_rows(start_server: Callable[..., ServerProcess], capacity: int) -> None:
    server = start_server("--capacity", str(capacity), "--slot-rows", "1", "--headroom", "1")
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=0) as learner,
    ):
        for mark in range(7):
            collector.write(marks(mark, mark + 1))
            batch = learner.sample(capacity, min_committed=collector.flush())
            assert set(batch["mark"].tolist()) <= set(range(max(0, mark + 1 - capacity), mark + 1))


def test_uniform_draws_pass_a_chi_square_test(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "100", "--slot-rows", "16")
    counts = np.zeros(100)
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", seed=7) as learner,
    ):
        collector.write(marks(0, 250))
        seq = collector.flush()
        for _ in range(500):
            batch = learner.sample(100, min_committed=seq)
            counts += np.bincount(batch["mark"].numpy() - 150, minlength=100)
    expected = counts.sum() / 100
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_LIMIT


def draws(server: ServerProcess, seed: int, name: str, batches: int = 5) -> list[list[int]]:
    with Learner.connect(server.name, run_dir=server.run_dir, device="cpu", seed=seed, name=name) as learner:
        return [learner.sample(64, min_committed=100)["mark"].tolist() for _ in range(batches)]


def test_equal_seeds_names_and_windows_give_equal_rows_and_others_do_not(start_server: Callable[..., ServerProcess]) -> None:
    one, same, other = (start_server("--capacity", "100", "--slot-rows", "16", "--seed", seed) for seed in ("3", "3", "4"))
    for server in (one, same, other):
        with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
            collector.write(marks(0, 130))
            assert collector.flush() == 130
    first = draws(one, 1, "a")
    assert first == draws(same, 1, "a") == draws(one, 1, "a")
    assert len({tuple(batch) for batch in first}) == 5, "each request draws rows of its own"
    for different in (draws(one, 2, "a"), draws(one, 1, "b"), draws(other, 1, "a")):
        assert all(batch != again for batch, again in zip(first, different, strict=True))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_batch_above_the_capacity_fails_at_once_with_both_numbers(start_server: Callable[..., ServerProcess], prefetch: int) -> None:
    server = start_server("--capacity", "37", "--slot-rows", "8", "--headroom", "16")
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=prefetch) as learner,
    ):
        with pytest.raises(InvalidRequest, match=r"38.*37"):
            learner.sample(38, timeout=60)
        collector.write(marks(0, 40))
        collector.flush()
        with pytest.raises(InvalidRequest, match=r"38.*37"):
            learner.sample(38, timeout=60)
        assert len(learner.sample(37)) == 37


def test_max_age_rows_draws_from_the_newest_rows_only(server: ServerProcess) -> None:
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu") as learner,
    ):
        collector.write(marks(0, 200))
        seq = collector.flush()
        batch = learner.sample(500, max_age_rows=10, min_committed=seq)
        assert set(batch["mark"].tolist()) == set(range(190, 200))
