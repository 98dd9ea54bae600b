"""Promises of the age bias: the truncated geometric distribution, inside the window, at half-lives from 1 to 10^12."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replay_server_client import recent
from replay_server_client.draw import Drawn, draw_uniform, request_key
from replay_server_client.recent import draw_recent

CPU = torch.device("cpu")


def draw(key: int, tail: int, size: int, n: int, ring_rows: int, half_life_rows: float) -> Drawn:
    drawn = Drawn.of(n, CPU)
    drawn.parameters[:3] = torch.tensor((key, tail, size))
    draw_recent(drawn, ring_rows, torch.tensor(half_life_rows, dtype=torch.float64))
    return drawn


def draw_ages(size: int, half_life_rows: float, draws: int = 20, n: int = 10_000) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How often each age came."""
    counts = np.zeros(size, dtype=np.int64)
    for number in range(draws):
        drawn = draw(request_key(0, 0, "x", 0, number), 77, size, n, size + 5, half_life_rows)
        counts += np.bincount(77 + size - 1 - drawn.seqs.numpy(), minlength=size)
    return counts


@pytest.mark.parametrize("half_life_rows", [0.5, 1.0, 3.0, 100.0, 1e4, 1e12])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_each_age_comes_as_often_as_its_probability_says(size: int, half_life_rows: float) -> None:
    """Chi-square over the ages expected at least 10 times, the others taken together; five deviations."""
    counts = draw_ages(size, half_life_rows)
    shares = np.exp2(-np.arange(size) / half_life_rows)
    expected = shares / shares.sum() * counts.sum()
    often = expected >= 10
    bins = [(counts[often], expected[often])]
    if expected[~often].sum() >= 10:
        bins.append((counts[~often].sum(keepdims=True), expected[~often].sum(keepdims=True)))
    observed, wanted = (np.concatenate(parts) for parts in zip(*bins, strict=True))
    freedom = len(observed) - 1
    assert ((observed - wanted) ** 2 / wanted).sum() <= freedom + 5 * math.sqrt(2 * freedom) + 1e-6
    assert counts[~often].sum() <= expected[~often].sum() + 5 * math.sqrt(expected[~often].sum() + 1)


@given(
    key=st.integers(-(2**63), 2**63 - 1),
    tail=st.integers(0, 2**62),
    size=st.integers(1, 2**40),
    ring_rows=st.integers(1, 2**40),
    half_life_rows=st.floats(1e-3, 1e12),
)
def test_rows_lie_in_the_window_and_indices_in_the_ring(key: int, tail: int, size: int, ring_rows: int, half_life_rows: float) -> None:
    drawn = draw(key, tail, size, 64, ring_rows, half_life_rows)
    assert drawn.seqs.min() >= tail
    assert drawn.seqs.max() < tail + size
    assert torch.equal(drawn.indices, drawn.seqs % ring_rows)
    assert torch.equal(drawn.weights, torch.ones(64))


def test_the_largest_u_draws_the_oldest_row_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the formula is rounded up to an age of 351, one too many."""
    monkeypatch.setattr(recent, "hash_of", lambda counters, key: torch.full_like(counters, -1))
    assert draw(1, 1000, 351, 2, 400, 1e6).seqs.tolist() == [1000, 1000]


@pytest.mark.parametrize("half_life_rows", [1e12, 1e18])
def test_a_half_life_far_above_the_window_draws_uniformly(half_life_rows: float) -> None:
    """Without log1p only some 6,000 different ages would be left at 10^18."""
    size = 10**6
    ages = size - 1 - draw(1, 0, size, 100_000, size, half_life_rows).seqs
    assert len(set(ages.tolist())) > 90_000
    assert abs(float(ages.double().mean()) / size - 0.5) < 5 / math.sqrt(12 * 100_000)


def test_half_of_the_rows_are_younger_than_the_half_life() -> None:
    size, half_life_rows, n = 10**7, 10_000, 100_000
    ages = size - 1 - draw(1, 0, size, n, size, half_life_rows).seqs
    assert abs(int((ages < half_life_rows).sum()) - n / 2) < 5 * math.sqrt(n / 4)


def test_draws_of_different_keys_are_independent_and_of_equal_keys_equal() -> None:
    first, again, other = (draw(key, 0, 2**40, 1000, 2**40, 1e11).seqs for key in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.isin(first, other).any()


def test_draw_leaves_no_trace_for_the_next_draw() -> None:
    drawn = draw(3, 10, 100, 64, 128, 20.0)
    draw_uniform(drawn, 128)
    plain = Drawn.of(64, CPU)
    plain.parameters.copy_(drawn.parameters)
    draw_uniform(plain, 128)
    assert torch.equal(drawn.seqs, plain.seqs)
    assert torch.equal(drawn.indices, plain.indices)


def test_draw_reads_no_value_on_the_host() -> None:
    """The meta device has shapes and no values."""
    drawn = Drawn.of(16, torch.device("meta"))
    draw_recent(drawn, 100, torch.zeros((), dtype=torch.float64, device="meta"))
    assert drawn.seqs.shape == (16,)
