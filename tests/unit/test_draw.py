"""Promises of the draw: deterministic, inside the window, uniform, independent between keys, and free of host reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replay_server_client.draw import Drawn, draw_uniform, hash_of, request_key, uniform

CPU = torch.device("cpu")


def draw(key: int, tail: int, size: int, n: int, ring_rows: int) -> Drawn:
    drawn = Drawn.of(n, CPU)
    drawn.parameters[:3].copy_(torch.tensor((key, tail, size)))
    draw_uniform(drawn, ring_rows)
    return drawn


def splitmix(key: int, i: int) -> int:
    """Row i's hash in Python's integers: the published finalizer."""
    mask = 2**64 - 1
    z = (key + (i + 1) * 0x9E3779B97F4A7C15) & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


@given(key=st.integers(-(2**63), 2**63 - 1), n=st.integers(1, 100))
def test_hash_is_splitmix64_bit_by_bit(key: int, n: int) -> None:
    counters = Drawn.of(n, CPU).counters
    assert np.array_equal(hash_of(counters, torch.tensor(key)).numpy(), hash_of(counters.numpy(), np.int64(key)))
    assert [value % 2**64 for value in hash_of(counters, key).tolist()] == [splitmix(key, i) for i in range(n)]


@given(key=st.integers(-(2**63), 2**63 - 1), tail=st.integers(0, 2**62), size=st.integers(1, 2**40), ring_rows=st.integers(1, 2**40))
def test_rows_lie_in_the_window_and_indices_in_the_ring(key: int, tail: int, size: int, ring_rows: int) -> None:
    drawn = draw(key, tail, size, 64, ring_rows)
    assert drawn.seqs.min() >= tail
    assert drawn.seqs.max() < tail + size
    assert torch.equal(drawn.indices, drawn.seqs % ring_rows)
    assert torch.equal(drawn.weights, torch.ones(64))


@given(key=st.integers(-(2**63), 2**63 - 1), tail=st.integers(0, 2**62), size=st.integers(1, 2**40), ring_rows=st.integers(1, 2**40))
def test_both_arithmetics_draw_the_same_rows(key: int, tail: int, size: int, ring_rows: int) -> None:
    """torch's is that of CUDA."""
    by_numpy = draw(key, tail, size, 64, ring_rows)
    seqs, indices = uniform(by_numpy.parameters, by_numpy.counters, ring_rows=ring_rows)
    assert torch.equal(by_numpy.seqs, seqs)
    assert torch.equal(by_numpy.indices, indices)


def test_same_parameters_draw_the_same_rows_into_the_same_memory() -> None:
    drawn = draw(7, 100, 1000, 256, 300)
    first, address = drawn.seqs.clone(), drawn.seqs.data_ptr()
    draw_uniform(drawn, 300)
    assert torch.equal(drawn.seqs, first)
    assert drawn.seqs.data_ptr() == address


def test_these_rows_are_drawn_for_ever() -> None:
    """A golden draw: another result would make every recorded run irreproducible."""
    key = request_key(0, 1, "learner", 0, 1)
    assert key == 993266215114604458
    assert draw(key, 1000, 50_000, 5, 65_536).seqs.tolist() == [38298, 2979, 41530, 8335, 30423]


def test_every_row_is_drawn_equally_often() -> None:
    """Chi-square over 1,000 rows: 999 degrees of freedom, mean 999, deviation 44.7; five deviations either side."""
    counts = torch.zeros(1000, dtype=torch.int64)
    for number in range(100):
        counts += torch.bincount(draw(request_key(0, 0, "x", 0, number), 0, 1000, 10_000, 1000).seqs, minlength=1000)
    chi_square = float(((counts - 1000.0) ** 2 / 1000).sum())
    assert 775 < chi_square < 1223


@pytest.mark.parametrize("other", [(1, 1, "a", 0, 1), (0, 2, "a", 0, 1), (0, 1, "b", 0, 1), (0, 1, "a", 1, 1), (0, 1, "a", 0, 2)])
def test_each_part_of_the_key_gives_an_independent_draw(other: tuple[int, int, str, int, int]) -> None:
    first = draw(request_key(0, 1, "a", 0, 1), 0, 2**40, 1000, 2**40).seqs
    second = draw(request_key(*other), 0, 2**40, 1000, 2**40).seqs
    assert not torch.isin(first, second).any()


def test_draw_reads_no_value_on_the_host() -> None:
    """What a CUDA graph can't capture would fail on the meta device, which has shapes and no values."""
    meta = torch.device("meta")
    drawn = Drawn.of(16, meta)
    draw_uniform(drawn, 100)
    assert drawn.seqs.shape == (16,)
