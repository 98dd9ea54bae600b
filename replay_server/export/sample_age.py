"""The age of sampled rows, as a histogram that only rises."""

from __future__ import annotations

from replay_server.export.reading import Report, number
from replay_server.export.timeline import Timeline, age_s, shares_below

AGE_BOUNDS_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0)


class SampleAge:
    """Learners draw in their own processes, so nobody sees single rows: rows sampled between two looks count by the ages in the window.

    Exact for uniform draws, up to the second between two looks; prioritized and recent draws have an age of their own.
    """

    def __init__(self) -> None:
        self.below_rows = [0.0] * len(AGE_BOUNDS_S)
        self.rows = 0.0
        self.sum_s = 0.0
        self._timeline = Timeline()
        self._generation: float | None = None

    def see(self, now_s: float, report: Report, sampled_rows: float) -> tuple[float | None, float | None]:
        """Counts ``sampled_rows`` by the window's ages; returns the ages in seconds below which half and 95 % of the window are."""
        committed, tail = int(number(report, "ring.committed")), int(number(report, "ring.tail"))
        if self._generation != number(report, "generation"):
            self._generation, self._timeline = number(report, "generation"), Timeline()
            self._timeline.note(now_s - max(1e-3, number(report, "uptime_s")), 0, 0)
        self._timeline.note(now_s, committed, tail)
        below = shares_below(self._timeline, now_s, committed, tail, AGE_BOUNDS_S)
        if committed > tail and sampled_rows > 0:
            self.below_rows = [rows + share * sampled_rows for rows, share in zip(self.below_rows, below, strict=True)]
            self.rows += sampled_rows
            self.sum_s += sampled_rows * self._mean_s(now_s, committed, tail)
        median_s, high_s = (age_s(self._timeline, now_s, committed, tail, share) for share in (0.5, 0.95))
        return median_s, high_s

    def _mean_s(self, now_s: float, committed: int, tail: int) -> float:
        """Over twenty evenly spaced rows of the window."""
        ages_s = (age_s(self._timeline, now_s, committed, tail, (step + 0.5) / 20) for step in range(20))
        return sum(age for age in ages_s if age is not None) / 20
