"""Draws in proportion to priority, over the lap-guarded column of priorities: pure torch, one pass over the ring where it is compiled.

Proportional prioritization (Schaul, Quan, Antonoglou and Silver, "Prioritized Experience Replay", ICLR 2016, 3.3 equation 1 and 3.4):

    P(i) = p_i / sum p,   p_i = value_i^alpha          w_i = (N P(i))^-beta / max over the batch = (min p / p_i)^beta

Values are stored as they are given; add the paper's epsilon before if 0 shall not mean never. A row whose record is absent (its lap is
not the row's own) counts as the largest value in the window, 1 where there is none. Rows outside the window, whose memory may change
while it is read, count as 0: they are masked by position, before any of their bytes could take part in a sum or a maximum.

```
records  ─► of each block of ring rows: sum of p, share of absent rows, largest value
         ─► sums of blocks, absent rows as the largest value; sums of spans of blocks       float64: in float32 above 2^24 a sum no
u × sum  ─► span: the first whose cumulative sum is above ─► block of the span: likewise    longer grows by 1
records of that block  ─► p  ─► row: likewise
```
So no long scan runs over every ring row. ``p`` itself is float32: with values up to 1e18 (check_priorities) and alpha up to 2
(check_exponent) it can't overflow; below 1e-45 it is 0. A scan that runs in parallel may be out of order in its last digit: what falls
outside the window or the block by that is clamped into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from replay_server_client.draw import Drawn, hash_of, uniform_seqs
from replay_server_client.lap_column import LapColumn
from replay_server_client.recent import UNIT_BITS, units_of

_BLOCK_ROWS = 64
_SPAN_BLOCKS = 128
_NO_VALUE = -1.0
"""Of rows without a record. Where none has one, the largest is -1, and its magnitude the value that is wanted."""
_BELOW_1 = 1 - 2.0**-53
_LEAST = torch.finfo(torch.float64).tiny

Draws = tuple[Tensor, ...]
"""seqs and ring indices (int64[n]), weights (float32[n]), whether every row had 0 (bool without a dimension). With ``tells_mass`` also
``p`` of each draw (float64[n]), and the sum of ``p`` over the window with the smallest one above 0 in it, or inf (float64[2])."""


class PriorityDraw:
    """Prioritized draws of ``n`` rows, one for each batch buffer. ``function`` stands for ``prioritized``.

    ``all_zero``, int64 on the device, counts the draws that fell back to uniform because nothing had a priority above 0. ``masses`` and
    ``sums`` take what ``Draws`` tells of masses, where they are given: a batch of several shards is weighted by all of theirs.
    """

    def __init__(self, device: torch.device, function: Callable[..., Draws] | None = None) -> None:
        self.all_zero = torch.zeros((), dtype=torch.int64, device=device)
        self.masses: Tensor | None = None
        self.sums: Tensor | None = None
        self._function = function or prioritized

    def draw(
        self, drawn: Drawn, ring_rows: int, column: LapColumn, alpha: Tensor, beta: Tensor, half_life_rows: Tensor | None = None
    ) -> None:
        """Draws rows of the window in proportion to their priority, with replacement; ``size`` must be at least 1.

        ``alpha``, 0 to 2, and ``beta`` are float64 without a dimension, not negative. With ``half_life_rows``, likewise, ``p_i`` is
        multiplied by 2^(-age / half_life_rows), as in ``draw_recent``. Where the sum is 0, and where alpha is 0 without a half-life, the
        rows are those of ``draw_uniform``, all weights 1.
        """
        more = {"tells_mass": True} if self.masses is not None else {}
        found = self._function(drawn.parameters, drawn.counters, column.records, alpha, beta, half_life_rows, ring_rows=ring_rows, **more)
        for fixed, result in zip((drawn.seqs, drawn.indices, drawn.weights), found, strict=False):
            fixed.copy_(result)
        if self.masses is not None and self.sums is not None:
            self.masses.copy_(found[4])
            self.sums.copy_(found[5])
        self.all_zero.add_(found[3])


def prioritized(
    parameters: Tensor,
    counters: Tensor,
    records: Tensor,
    alpha: Tensor,
    beta: Tensor,
    half_life_rows: Tensor | None,
    *,
    ring_rows: int,
    tells_mass: bool = False,
) -> Draws:
    """Laps are read with values, twice: what a learner writes meanwhile, or an old lap's late write, gives this one draw another value."""
    key, tail, size = parameters[:3].unbind()
    block_rows = min(_BLOCK_ROWS, ring_rows)
    places = torch.arange(ring_rows, dtype=torch.int32, device=records.device)
    rows = _rows_at(places, records[:-1], tail, size, alpha, half_life_rows, ring_rows)
    largest = _by_block(lambda values: torch.amax(values, 1), rows.values, block_rows).amax(0, keepdim=True).abs()
    absent_mass = torch.pow(largest, alpha)
    sums = _by_block(_sum, rows.masses, block_rows) + _by_block(_sum, rows.absent, block_rows) * absent_mass
    spans = torch.nn.functional.pad(sums, (0, -len(sums) % _SPAN_BLOCKS)).view(-1, _SPAN_BLOCKS)
    cumulative = torch.cumsum(spans.sum(1), 0)
    total = cumulative[-1]
    least = _least(rows, absent_mass, block_rows) if tells_mass else total

    hashes = hash_of(counters, key)
    targets = units_of(hashes) * (total * 2.0**-UNIT_BITS)  # below the total for every u, so each is found at a span that adds to it
    span = torch.searchsorted(cumulative, targets, right=True).clamp(max=len(spans) - 1)
    targets = targets - torch.where(span == 0, 0.0, cumulative[(span - 1).clamp(min=0)])
    within, before = _find(spans[span], targets)
    blocks = span * _SPAN_BLOCKS + within
    places = blocks[:, None] * block_rows + torch.arange(block_rows, device=records.device)
    rows = _rows_at(places, records[places.clamp(max=ring_rows)], tail, size, alpha, half_life_rows, ring_rows)
    masses = rows.masses + rows.absent * absent_mass.double()
    within, _ = _find(masses, targets - before)
    positions = (blocks * block_rows + within - tail) % ring_rows

    is_zero = total == 0
    is_uniform = is_zero if half_life_rows is not None else is_zero | (alpha == 0)
    seqs = torch.where(is_uniform, uniform_seqs(hashes, tail, size), torch.minimum(positions, size - 1) + tail)
    # Only a row that the scan's rounding chose has no mass: a weight may be wrong, never NaN. Those of a uniform draw come out as 1.
    chosen = masses.gather(1, within[:, None])[:, 0].clamp(min=_LEAST)
    weights = torch.pow(chosen.amin() / chosen, beta).float()
    drawn = seqs, seqs % ring_rows, weights, is_zero
    return (*drawn, chosen, torch.stack((total, least))) if tells_mass else drawn


class _Rows(NamedTuple):
    """What ring rows count for in a draw."""

    values: Tensor  # float32: of rows of the window with a record, -1 of others
    masses: Tensor  # p of rows of the window with a record, 0 of others
    absent: Tensor  # what p is multiplied by of rows of the window without a record, 0 of others


def _rows_at(
    places: Tensor, records: Tensor, tail: Tensor, size: Tensor, alpha: Tensor, half_life_rows: Tensor | None, ring_rows: int
) -> _Rows:
    """Of the ring indices ``places`` and their records; an index past the ring is outside the window."""
    laps, stored = records[..., 0], records.view(torch.float32)[..., 1]
    start, lap = tail % ring_rows, 1 + tail // ring_rows
    end = start + size
    is_first_part = (places >= start) & (places < end.clamp(max=ring_rows))
    is_second_part = places < end - ring_rows  # the window goes on at the ring's beginning
    has_record = is_first_part & (laps == lap) | is_second_part & (laps == lap + 1)
    is_absent = (is_first_part | is_second_part) & ~has_record
    values = torch.where(has_record, stored, _NO_VALUE)
    masses = torch.where(has_record, torch.pow(stored, alpha), 0.0)
    if half_life_rows is None:
        return _Rows(values, masses, is_absent)
    ages = torch.where(is_second_part, end - ring_rows, end) - 1 - places
    factors = torch.where(has_record | is_absent, torch.exp2(-ages / half_life_rows), 0.0)
    return _Rows(values, masses * factors, is_absent * factors)


def _least(rows: _Rows, absent_mass: Tensor, block_rows: int) -> Tensor:
    """The smallest mass above 0; inf where there is none."""
    both = (_by_block(_least_positive, masses, block_rows).amin() for masses in (rows.masses, rows.absent * absent_mass))
    return torch.minimum(*both).double()


def _least_positive(masses: Tensor) -> Tensor:
    return torch.where(masses > 0, masses, torch.inf).amin(1)


def _find(masses: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Where in its ``masses`` (``[n, any]``) each target lies: the first place whose cumulative sum is above it, and the sum before that.

    Such a place has mass, and a target that rounding put past the sum of all is taken for one just below.
    """
    scan = torch.cumsum(masses, 1)
    found = (scan <= torch.minimum(targets, scan[:, -1] * _BELOW_1)[:, None]).sum(1).clamp(max=masses.shape[1] - 1)
    before = scan.gather(1, (found - 1).clamp(min=0)[:, None])[:, 0]
    return found, torch.where(found == 0, 0.0, before)


def _by_block(reduce: Callable[[Tensor], Tensor], of_rows: Tensor, block_rows: int) -> Tensor:
    """``reduce`` of ``[blocks, block_rows]``, the last block shorter where the ring is no multiple."""
    whole = len(of_rows) // block_rows * block_rows
    reduced = reduce(of_rows[:whole].view(-1, block_rows))
    return reduced if whole == len(of_rows) else torch.cat((reduced, reduce(of_rows[None, whole:])))


def _sum(masses: Tensor) -> Tensor:
    return masses.sum(1, dtype=torch.float64)
