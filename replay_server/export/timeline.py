"""When each row was committed, as far as looking once a second tells: from that, how old the rows are that can be sampled."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

_MOST_POINTS = 2048


class Timeline:
    """Points (time, committed) of one generation, in order; between two points rows count as committed evenly.

    ```
    committed   ·───·  ·   idle: two points of one height, the second moves on
               ╱     ╲╱    never down
    time      ─┴──────┴──►
    ```
    Bounded: when full, every second point of the older half goes, so that what is old is known more coarsely.
    """

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._seqs: list[int] = []

    def note(self, now_s: float, committed: int, tail: int) -> None:
        """``committed`` rows were visible at ``now_s``, the oldest of them ``tail``. Nothing before it is kept."""
        if self._times_s and (now_s <= self._times_s[-1] or committed < self._seqs[-1]):
            return
        if len(self._seqs) > 1 and self._seqs[-1] == self._seqs[-2] == committed:
            self._times_s[-1] = now_s
            return
        self._times_s.append(now_s)
        self._seqs.append(committed)
        passed = bisect_right(self._seqs, tail) - 1  # the last point at or below the tail: still needed
        if passed > 0:
            del self._times_s[:passed], self._seqs[:passed]
        if len(self._seqs) > _MOST_POINTS:
            half = _MOST_POINTS // 2
            del self._times_s[1:half:2], self._seqs[1:half:2]

    @property
    def points(self) -> int:
        return len(self._seqs)

    def committed_at(self, when_s: float) -> float:
        """How many rows were committed by ``when_s``; before the first point as many as then."""
        place = bisect_right(self._times_s, when_s)
        if place == 0:
            return float(self._seqs[0]) if self._seqs else 0.0
        if place == len(self._times_s):
            return float(self._seqs[-1])
        before_s, after_s = self._times_s[place - 1], self._times_s[place]
        before, after = self._seqs[place - 1], self._seqs[place]
        return before + (after - before) * (when_s - before_s) / (after_s - before_s)

    def time_of(self, seq: float) -> float:
        """When row ``seq`` became visible; the first or last point for rows outside them."""
        place = bisect_right(self._seqs, seq)
        if place == 0 or place == len(self._seqs):
            return self._times_s[0 if place == 0 else -1]
        before, after = self._seqs[place - 1], self._seqs[place]
        before_s, after_s = self._times_s[place - 1], self._times_s[place]
        return before_s + (after_s - before_s) * (seq - before) / (after - before)


def age_s(timeline: Timeline, now_s: float, committed: int, tail: int, share: float) -> float | None:
    """The age below which ``share`` of the window's rows are: what a uniform draw sees. None for an empty window."""
    if committed <= tail or not timeline.points:
        return None
    return max(0.0, now_s - timeline.time_of(committed - share * (committed - tail)))


def shares_below(timeline: Timeline, now_s: float, committed: int, tail: int, bounds_s: Sequence[float]) -> list[float]:
    """Which share of the window is younger than each bound, rising to 1 at most; of an empty window zeros."""
    size = committed - tail
    if size <= 0:
        return [0.0] * len(bounds_s)
    return [min(1.0, (committed - max(tail, timeline.committed_at(now_s - bound_s))) / size) for bound_s in bounds_s]
