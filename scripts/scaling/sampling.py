"""Batches of one learner of many shards, in simulated time: the real Router."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from replay_server_client.router import Counts, Router
from scaling.costs import Costs

Floats = npt.NDArray[np.float64]


class Shards:
    """Rings of half to one and a half times the same capacity that fill at random rates, and a router that knows what it was told last."""

    def __init__(self, count: int, total_rows: float, full: float, fill_rows_per_s: float, seed: int) -> None:
        """``fill_rows_per_s`` is a shard's mean rate; of 0 all are as full as they will be."""
        self._rng = np.random.default_rng(seed)
        capacity = self._rng.uniform(0.5, 1.5, count)
        self._capacity = np.floor(capacity / capacity.sum() * total_rows)
        self._sizes = np.floor(self._capacity * full * self._rng.uniform(0.5, 1.0, count)) if fill_rows_per_s else self._capacity.copy()
        self._fill_rows_per_s = fill_rows_per_s
        self.is_alive = np.ones(count, bool)
        self.router = Router([f"s{i}" for i in range(count)], seed=seed)
        self._tell(range(count))

    @property
    def shares(self) -> Floats:
        """Of each shard in the rows there are."""
        return np.where(self.is_alive, self._sizes, 0) / self._sizes[self.is_alive].sum()

    def lose(self, share: float) -> list[str]:
        """That share of them, at once; which."""
        count = len(self.is_alive)
        gone = self._rng.choice(count, max(1, int(count * share)), replace=False)
        self.is_alive[gone] = False
        return [self.router.shards[i] for i in gone]

    def fill(self, seconds: float, asked: Counts) -> None:
        """Those that were asked for rows told what they hold with their answer."""
        rates = self._fill_rows_per_s * self._rng.uniform(0, 2, len(self.is_alive))
        self._sizes = np.minimum(self._capacity, self._sizes + rates * seconds)
        self._tell(i for i in np.flatnonzero(np.array(asked.rows) > 0) if self.is_alive[i])

    def _tell(self, places: Iterable[int]) -> None:
        for i in places:
            self.router.report(self.router.shards[i], generation=1, size_rows=int(self._sizes[i]))


class Errors:
    """How far from uniform over the union the draws were.

    ``bounds``: half the sum of |share known - share true| of each batch, the most by which any event's probability may be off. ``drawn``:
    the same of the rows really drawn over all batches, beside what chance alone gives (``chance``).
    """

    def __init__(self, shards: int) -> None:
        self.bounds: list[float] = []
        self.rows = np.zeros(shards)
        self._ideal = np.zeros(shards)

    def note(self, counts: Counts, n: int, shares: Floats) -> None:
        known = np.array(counts.sizes, float)
        self.bounds.append(0.5 * np.abs(known / known.sum() - shares).sum())
        self.rows += counts.rows
        self._ideal += n * shares

    @property
    def drawn(self) -> float:
        return float(0.5 * np.abs(self.rows - self._ideal).sum() / self._ideal.sum())

    @property
    def chance(self) -> float:
        ideal, total = self._ideal[self._ideal > 0], self._ideal.sum()
        return float(math.sqrt(2 / math.pi) * 0.5 * np.sqrt(ideal * (1 - ideal / total)).sum() / total)


def sample(
    costs: Costs,
    shards: int,
    *,
    n: int = 4096,
    total_rows: float = 1e10,
    row_bytes: int = 256,
    batches: int = 100,
    full: float = 1.0,
    fill_rows_per_s: float = 0.0,
    lose_share: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Batches of a learner of ``shards``: seconds each, and their errors. ``lose_share`` of the shards goes half-way."""
    union, errors = Shards(shards, total_rows, full, fill_rows_per_s, seed), Errors(shards)
    now_s, took, timeline = 0.0, [], []
    for batch in range(batches):
        counts = union.router.draw(n)
        cost_s = batch_s(costs, counts.rows, row_bytes)
        if lose_share and batch == batches // 2:
            counts = union.router.redraw(counts, union.lose(lose_share))
            cost_s += costs.notice_s + batch_s(costs, [rows // 2 for rows in counts.rows], row_bytes)
        errors.note(counts, n, union.shares)
        now_s += cost_s
        took.append(cost_s)
        timeline.append([now_s, n / cost_s])
        union.fill(cost_s, counts)
    return {
        "shards": shards,
        "total_rows": total_rows,
        "n": n,
        "ms_per_batch": float(np.median(took) * 1e3),
        "rows_per_s": n / float(np.median(took)),
        "slowest_batch_s": max(took),
        "error_bound": max(errors.bounds),
        "mean_error_bound": float(np.mean(errors.bounds)),
        "drawn_error": errors.drawn,
        "chance": errors.chance,
        "rows_of_lost_after": int(errors.rows[~union.is_alive].sum()) if not lose_share else None,
        "epochs": union.router.epoch,
        "rows_per_s_over_time": timeline,
    }


def batch_s(costs: Costs, rows: Any, row_bytes: int) -> float:
    """All shards asked one after the other by one thread, each serving at once; answers share the learner's link."""
    asked = sum(1 for k in rows if k)
    most = max(rows)
    call_s, serve_s = costs.of_call(0)  # a request is small
    answered_s = 2 * costs.latency_s + serve_s + most * costs.row_s
    return max(asked * call_s, sum(rows) * row_bytes / costs.bandwidth) + answered_s
