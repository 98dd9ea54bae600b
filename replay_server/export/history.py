"""The last fifteen minutes, one point a look, for the page's charts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import islice

from replay_server.export.reading import Report, fill, found, number

SPAN_S = 900.0
KEYS = (
    "time_s",
    "fill",
    "rows_per_s",
    "batches_per_s",
    "collectors_wait",
    "learners_wait",
    "commit_p50_us",
    "commit_p99_us",
    "grant_p50_us",
    "grant_p99_us",
    "samples_per_insert",
    "sample_age_p50_s",
    "sample_age_p95_s",
)
Point = tuple[float | None, ...]


class History:
    """Points in order, numbered for ever; the oldest go. A look that found no server is a point of nothing but its time."""

    def __init__(self, interval_s: float) -> None:
        self._points: deque[Point] = deque(maxlen=math.ceil(SPAN_S / interval_s))
        self._next = 0
        self._waited: tuple[float, float, float, float] | None = None

    def absent(self, time_s: float) -> None:
        self._waited = None
        self._add((time_s, *(None,) * (len(KEYS) - 1)))

    def see(self, time_s: float, report: Report, ages_s: tuple[float | None, float | None]) -> None:
        """Adds one point; what is not known yet is None in it."""
        latency = [found(report, f"latency.{kind}_us.{part}") for kind in ("commit", "grant") for part in ("p50", "p99")]
        rates = number(report, "rates.rows_per_s"), number(report, "rates.batches_per_s")
        waits = self._wait_shares(report)
        self._add((time_s, fill(report), *rates, *waits, *latency, found(report, "flow.samples_per_insert"), *ages_s))

    def after(self, number_: int) -> tuple[int, list[Point]]:
        """The number of the next point, and those from ``number_`` on that are still kept."""
        first = self._next - len(self._points)
        if number_ > self._next:  # of an exporter before this one
            number_ = 0
        return self._next, list(islice(self._points, max(0, number_ - first), None))

    def _add(self, point: Point) -> None:
        self._points.append(point)
        self._next += 1

    def _wait_shares(self, report: Report) -> tuple[float | None, float | None]:
        """Which share of the time since the last look collectors waited, and learners; None at the first look at a generation."""
        seconds = found(report, "flow.time_in_state_s")
        if not isinstance(seconds, Mapping):
            return None, None
        both = number(seconds, "both_wait")
        waited = [both + sum(s for state, s in seconds.items() if state.startswith(f"{side}_wait")) for side in ("collectors", "learners")]
        now = (number(report, "generation"), sum(seconds.values()), waited[0], waited[1])
        last, self._waited = self._waited, now
        if last is None or last[0] != now[0] or now[1] <= last[1]:
            return None, None
        passed_s = now[1] - last[1]
        return min(1.0, (now[2] - last[2]) / passed_s), min(1.0, (now[3] - last[3]) / passed_s)
