"""Promises of prioritized draws: the rows and weights of a slow reference, nothing from outside the window, no absent record believed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from replay_server_client import prioritized
from replay_server_client.draw import Drawn, draw_uniform, hash_of, request_key
from replay_server_client.lap_column import LARGEST_PRIORITY, LapColumn
from replay_server_client.prioritized import PriorityDraw
from support.rarely import combined, rarely
from torch import Tensor

CPU = torch.device("cpu")
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


class Ring:
    """A column of priorities and a window; every row's record is absent at first."""

    def __init__(self, ring_rows: int, tail: int, size: int) -> None:
        self.ring_rows, self.tail, self.size = ring_rows, tail, size
        self.column = LapColumn.of(torch.zeros(ring_rows + 1, 2, dtype=torch.int32))
        self._laps, self._stored = self.column.laps.numpy(), self.column.priorities.numpy()

    @property
    def seqs(self) -> range:
        return range(self.tail, self.tail + self.size)

    def set(self, seq: int, value: float, lap: int | None = None) -> None:
        index = seq % self.ring_rows
        self._laps[index] = 1 + seq // self.ring_rows if lap is None else lap
        self._stored[index] = value

    def fill(self, value_of: Callable[[int], float]) -> Ring:
        for seq in self.seqs:
            self.set(seq, value_of(seq))
        return self

    def values(self) -> Floats:
        """The values of the window's rows, by a loop."""
        laps, stored = self._laps.tolist(), self._stored.tolist()
        own = {seq: laps[seq % self.ring_rows] == 1 + seq // self.ring_rows for seq in self.seqs}
        largest = max((stored[seq % self.ring_rows] for seq in self.seqs if own[seq]), default=1.0)
        return np.array([stored[seq % self.ring_rows] if own[seq] else largest for seq in self.seqs])

    def masses(self, alpha: float, half_life_rows: float | None = None) -> Floats:
        mass: Floats = self.values() ** alpha
        return mass if half_life_rows is None else mass * np.exp2(-np.arange(self.size)[::-1] / half_life_rows)

    def draw(
        self,
        key: int = 1,
        n: int = 64,
        alpha: float = 1.0,
        beta: float = 0.5,
        half_life_rows: float | None = None,
        priority_draw: PriorityDraw | None = None,
    ) -> Drawn:
        drawn = Drawn.of(n, CPU)
        drawn.parameters[:3] = torch.tensor((key, self.tail, self.size))
        by = priority_draw or PriorityDraw(CPU)
        by.draw(drawn, self.ring_rows, self.column, scalar(alpha), scalar(beta), None if half_life_rows is None else scalar(half_life_rows))
        assert drawn.seqs.min() >= self.tail
        assert drawn.seqs.max() < self.tail + self.size
        assert torch.equal(drawn.indices, drawn.seqs % self.ring_rows)
        return drawn

    def expect(self, key: int = 1, n: int = 64, alpha: float = 1.0, half_life_rows: float | None = None) -> Tensor:
        """The rows drawn, by numpy: u × sum among the sums in the order of ring indices."""
        drawn = Drawn.of(n, CPU)
        units = np.array([value % 2**64 >> 11 for value in hash_of(drawn.counters, key).tolist()])
        order = sorted(self.seqs, key=lambda seq: seq % self.ring_rows)
        masses = self.masses(alpha, half_life_rows)
        sums = np.cumsum([masses[seq - self.tail] for seq in order])
        found = np.searchsorted(sums, units * (sums[-1] * 2.0**-53), side="right")
        return torch.tensor([order[place] for place in found])


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def random_ring(random: np.random.Generator, ring_rows: int, tail: int, size: int) -> Ring:
    """Integers from 0 to 9 as values, laps right, older, newer or never written; rows outside the window hold what must not be read."""
    ring = Ring(ring_rows, tail, size)
    for seq in range(tail, tail + ring_rows):
        own = 1 + seq // ring_rows
        lap = int(random.choice((own, own, own, max(own - 1, 0), own + 1, 0)))
        is_inside = seq < tail + size
        ring.set(seq, float(random.integers(0, 10) if is_inside else 1e30), lap if is_inside else own)
    return ring


@pytest.mark.parametrize("block_rows", [4, 11, *rarely(1, 5, 64)])
def test_every_window_of_a_small_ring_draws_the_reference_rows(monkeypatch: pytest.MonkeyPatch, block_rows: int) -> None:
    """Also where the window's ends cut one block or two, and where the ring is no multiple of a block."""
    monkeypatch.setattr(prioritized, "_BLOCK_ROWS", block_rows)
    random = np.random.default_rng(block_rows)
    ring_rows = 11
    by = PriorityDraw(CPU)
    for tail in range(2 * ring_rows + 1):
        for size in range(1, ring_rows + 1):
            ring = random_ring(random, ring_rows, tail, size)
            if ring.masses(1.0).sum() == 0:
                continue
            drawn = ring.draw(tail, priority_draw=by)
            assert torch.equal(drawn.seqs, ring.expect(tail)), (tail, size)
            shares = ring.masses(1.0) / ring.masses(1.0).sum()
            weights = (size * shares[drawn.seqs.numpy() - tail]) ** -0.5
            torch.testing.assert_close(drawn.weights.numpy(), (weights / weights.max()).astype(np.float32), rtol=1e-6, atol=0)
    assert int(by.all_zero) < 2 * ring_rows


@pytest.mark.parametrize(
    ("ring_rows", "alpha"), combined({(767, 1.0), (768, 2.0), (769, 1.0), (3000, 2.0)}, (767, 768, 769, 3000), (1.0, 2.0))
)
def test_windows_over_several_blocks_draw_the_reference_rows(ring_rows: int, alpha: float) -> None:
    random = np.random.default_rng(ring_rows)
    for size in (1, 700, ring_rows - 1, ring_rows):
        for tail in (0, ring_rows - 1, 3 * ring_rows + 517):
            ring = random_ring(random, ring_rows, tail, size)
            if ring.masses(alpha).sum() > 0:
                assert torch.equal(ring.draw(7, alpha=alpha).seqs, ring.expect(7, alpha=alpha))


QUICK = {(1, 0.6, None), (60, 1.0, 40.0), (1500, 0.0, 1.0), (1500, 0.6, 1e12)}


@pytest.mark.parametrize(("size", "alpha", "half_life_rows"), combined(QUICK, (1, 60, 1500), (0.0, 0.6, 1.0), (None, 1.0, 40.0, 1e12)))
def test_each_row_comes_as_often_as_its_probability_says(size: int, alpha: float, half_life_rows: float | None) -> None:
    """Chi-square over the rows expected at least 10 times; five deviations. What has no mass is never drawn."""
    random = np.random.default_rng(size)
    ring = Ring(size + 3, 2 * size + 1, size).fill(lambda _: float(random.choice((0.0, 0.1, 1.0, 7.5))))
    ring.set(ring.tail, 3.0)
    counts = np.zeros(size)
    by = PriorityDraw(CPU)
    for number in range(8):
        drawn = ring.draw(request_key(0, 0, "x", 0, number), 5_000, alpha, half_life_rows=half_life_rows, priority_draw=by)
        counts += np.bincount(drawn.seqs.numpy() - ring.tail, minlength=size)
    masses = ring.masses(alpha, half_life_rows)
    expected = masses / masses.sum() * counts.sum()
    assert counts[masses == 0].sum() == 0
    often = expected >= 10
    freedom = max(int(often.sum()) - 1, 1)
    assert ((counts - expected)[often] ** 2 / expected[often]).sum() <= freedom + 5 * math.sqrt(2 * freedom)
    assert counts[~often].sum() <= expected[~often].sum() + 5 * math.sqrt(expected[~often].sum() + 1)


@pytest.mark.parametrize("block_rows", [pytest.param(1, marks=pytest.mark.slow), 4, 5, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("half_life_rows", [0.7, 3.0, pytest.param(1e6, marks=pytest.mark.slow)])
def test_every_window_of_a_small_ring_is_biased_by_age(monkeypatch: pytest.MonkeyPatch, block_rows: int, half_life_rows: float) -> None:
    monkeypatch.setattr(prioritized, "_BLOCK_ROWS", block_rows)
    random = np.random.default_rng(block_rows)
    ring_rows = 11
    for tail in range(0, 2 * ring_rows, 3):
        for size in range(1, ring_rows + 1):
            ring = random_ring(random, ring_rows, tail, size)
            masses = ring.masses(0.6, half_life_rows)
            if masses.sum() == 0:
                continue
            drawn = ring.draw(tail, alpha=0.6, beta=1.0, half_life_rows=half_life_rows)
            assert torch.equal(drawn.seqs, ring.expect(tail, alpha=0.6, half_life_rows=half_life_rows)), (tail, size)
            chosen = masses[drawn.seqs.numpy() - tail]
            torch.testing.assert_close(drawn.weights.numpy(), (chosen.min() / chosen).astype(np.float32), rtol=1e-6, atol=0)


@pytest.mark.parametrize("half_life_rows", [None, 5.0])
def test_rows_outside_the_window_change_nothing(half_life_rows: float | None) -> None:
    """Not by a single bit: whatever their records say, be it the lap of the row that is to come or no number at all."""
    ring = Ring(3000, 7100, 1900).fill(lambda seq: seq % 7 + 0.1)
    first = ring.draw(alpha=0.6, half_life_rows=half_life_rows)
    for value in (3e38, torch.nan, torch.inf, -5.0):
        for lap in (0, 1, 2, 3, 4):
            for seq in range(ring.tail + ring.size, ring.tail + ring.ring_rows):
                if seq % 50 < 2:
                    ring.set(seq, value, lap)
            ring.column.records[-1] = lap
            again = ring.draw(alpha=0.6, half_life_rows=half_life_rows)
            assert torch.equal(again.seqs, first.seqs)
            assert torch.equal(again.weights, first.weights)


def test_a_late_write_of_an_old_lap_does_not_reach_the_new_row() -> None:
    """The writer was stopped with the priority of seq 3 in hand; its row is seq 13 by the time the write lands."""
    ring = Ring(10, 8, 8).fill(lambda _: 2.0)
    ring.set(13, 0.0, lap=0)
    before = ring.draw(n=1000).seqs
    for late in (1e-30, 0.0, 1e30, torch.nan):
        ring.set(13, late, lap=1)
        assert torch.equal(ring.draw(n=1000).seqs, before)
    assert (before == 13).sum() > 50


def test_absent_records_count_as_the_largest_value_in_the_window() -> None:
    ring = Ring(8, 0, 4)
    ring.set(0, 1.0)
    ring.set(1, 5.0)
    ring.set(6, 100.0)  # outside
    assert ring.values().tolist() == [1, 5, 5, 5]
    drawn = ring.draw(n=1000, beta=1.0)
    assert torch.equal(drawn.seqs, ring.expect(n=1000))
    assert set(zip(drawn.seqs.tolist(), drawn.weights.tolist(), strict=True)) == {
        (seq, float(np.float32(weight))) for seq, weight in ((0, 1.0), (1, 0.2), (2, 0.2), (3, 0.2))
    }


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_records_never_written_draw_every_row_equally_with_weights_of_1(alpha: float) -> None:
    ring = Ring(100, 350, 60)
    by = PriorityDraw(CPU)
    drawn = ring.draw(n=6000, alpha=alpha, priority_draw=by)
    assert torch.equal(drawn.weights, torch.ones(6000))
    assert torch.bincount(drawn.seqs - 350, minlength=60).min() > 50
    assert int(by.all_zero) == 0


@pytest.mark.parametrize("half_life_rows", [None, 5.0])
def test_all_zero_draws_what_uniform_draws_and_counts_it(half_life_rows: float | None) -> None:
    ring = Ring(100, 350, 60).fill(lambda _: 0.0)
    by = PriorityDraw(CPU)
    for times in (1, 2):
        drawn = ring.draw(times, alpha=0.6, half_life_rows=half_life_rows, priority_draw=by)
        assert torch.equal(drawn.weights, torch.ones(64))
        seqs = drawn.seqs.clone()
        draw_uniform(drawn, 100)
        assert torch.equal(seqs, drawn.seqs)
        assert int(by.all_zero) == times
    ring.set(380, 1.0)
    assert set(ring.draw(3, alpha=0.6, priority_draw=by).seqs.tolist()) == {380}
    assert int(by.all_zero) == 2


def test_alpha_0_draws_what_uniform_draws_zero_values_too() -> None:
    ring = Ring(100, 350, 60).fill(lambda seq: float(seq % 2))
    by = PriorityDraw(CPU)
    drawn = ring.draw(5, alpha=0.0, beta=1.0, priority_draw=by)
    seqs = drawn.seqs.clone()
    draw_uniform(drawn, 100)
    assert torch.equal(seqs, drawn.seqs)
    assert torch.equal(drawn.weights, torch.ones(64))
    assert int(by.all_zero) == 0


def test_beta_0_gives_weights_of_1() -> None:
    assert torch.equal(Ring(100, 350, 60).fill(float).draw(beta=0.0).weights, torch.ones(64))


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_the_largest_values_and_exponents_do_not_overflow(alpha: float) -> None:
    ring = Ring(100, 0, 100).fill(lambda seq: LARGEST_PRIORITY if seq % 2 else 1.0)
    drawn = ring.draw(n=1000, alpha=alpha)
    assert (drawn.seqs % 2 == 1).sum() > 990
    assert torch.isfinite(drawn.weights).all()
    assert len(drawn.seqs.unique()) > 40


def test_a_small_row_after_millions_of_large_ones_is_still_drawn() -> None:
    """A float32 sum stops growing at 2^24: the rows after it would never come."""
    ring_rows = 2**22
    ring = Ring(ring_rows, 0, ring_rows)
    ring.column.laps.fill_(1)
    ring.column.priorities.fill_(100.0)
    drawn = ring.draw(n=20_000)
    assert abs(float((drawn.seqs >= ring_rows // 2).double().mean()) - 0.5) < 0.02
    assert len(drawn.seqs.unique()) > 19_700


def test_a_hash_of_0_draws_the_first_row_that_has_mass() -> None:
    """The least u there is, among rows of 0 at the ring's beginning. The finalizer maps 0 to 0, so this key makes row 0's hash 0."""
    ring = Ring(100, 0, 60).fill(lambda seq: float(seq >= 5))
    assert int(ring.draw(key=2**64 - 0x9E3779B97F4A7C15).seqs[0]) == 5


def test_a_scan_out_of_order_draws_nothing_outside_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parallel scan may be, by a last digit; here much of a block's sum lies outside. ``Ring.draw`` looks at the rows."""
    ring = Ring(100, 350, 60).fill(lambda _: 1.0)

    def scan(mass: Tensor, dim: int) -> Tensor:
        sums = mass.cumsum(dim)
        if mass.shape[-1] == 64:
            sums[:, 10:] += 30  # as if the first row behind the window had this mass
        return sums

    monkeypatch.setattr(torch, "cumsum", scan)
    drawn = ring.draw(n=1000)
    assert (drawn.seqs == 409).sum() > 100
    assert torch.isfinite(drawn.weights).all()


@pytest.mark.parametrize("half_life", [None, torch.zeros((), dtype=torch.float64, device="meta")])
def test_draw_reads_no_value_on_the_host(half_life: Tensor | None) -> None:
    """What a CUDA graph can't capture would fail on the meta device, which has shapes and no values."""
    meta = torch.device("meta")
    column = LapColumn.of(torch.zeros(5001, 2, dtype=torch.int32, device=meta))
    drawn, one = Drawn.of(16, meta), torch.ones((), dtype=torch.float64, device=meta)
    PriorityDraw(meta).draw(drawn, 5000, column, one, one, half_life)
    assert drawn.seqs.shape == (16,)


@pytest.mark.parametrize("half_life_rows", [None, 7.0])
def test_told_masses_are_those_of_the_draws_their_sum_and_the_least_above_0(half_life_rows: float | None) -> None:
    ring = Ring(300, tail=450, size=200).fill(lambda seq: float(seq % 5))
    for seq in range(460, 500, 3):
        ring.set(seq, 1e9, lap=1)  # absent: counts as the largest
    by = PriorityDraw(CPU)
    by.masses, by.sums = torch.zeros(64, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    drawn = Drawn.of(64, CPU)
    drawn.parameters[:3] = torch.tensor((1, ring.tail, ring.size))
    alpha, beta = (torch.tensor(number, dtype=torch.float64) for number in (1.5, 0.5))
    age = None if half_life_rows is None else torch.tensor(half_life_rows, dtype=torch.float64)
    by.draw(drawn, ring.ring_rows, ring.column, alpha, beta, age)
    masses = ring.masses(1.5, half_life_rows)
    np.testing.assert_allclose(by.masses.numpy(), masses[drawn.seqs.numpy() - ring.tail], rtol=1e-5)
    np.testing.assert_allclose(by.sums.numpy(), [masses.sum(), masses[masses > 0].min()], rtol=1e-5)


def test_the_least_mass_of_nothing_but_zeros_is_infinite() -> None:
    ring = Ring(100, tail=0, size=50).fill(lambda seq: 0.0)
    by = PriorityDraw(CPU)
    by.masses, by.sums = torch.zeros(4, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    drawn = Drawn.of(4, CPU)
    drawn.parameters[:3] = torch.tensor((1, 0, 50))
    by.draw(drawn, 100, ring.column, torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64))
    assert by.sums.tolist() == [0.0, math.inf]
