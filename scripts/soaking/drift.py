"""How a gauge moved over a run: a robust slope, and whether that is a leak. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MOST_POINTS = 600


@dataclass(frozen=True)
class Limit:
    """A gauge leaks if it rises by more than ``per_hour`` and by more than ``noise`` over what was looked at: both, since over seconds
    the noise alone is any slope."""

    per_hour: float
    noise: float


@dataclass(frozen=True)
class Drift:
    """``per_hour`` is the slope after the warm-up, ``rise`` what it makes of the time looked at."""

    gauge: str
    unit: str
    median: float
    per_hour: float
    rise: float
    limit: Limit | None

    @property
    def is_leak(self) -> bool:
        return self.limit is not None and self.per_hour > self.limit.per_hour and self.rise > self.limit.noise


def drift_of(gauge: str, unit: str, times_s: Sequence[float], values: Sequence[float], warm_up_s: float, limit: Limit | None) -> Drift:
    """Of the values after ``warm_up_s``; looks without a value (NaN) don't count."""
    t, y = np.asarray(times_s, np.float64), np.asarray(values, np.float64)
    kept = (t >= warm_up_s) & np.isfinite(y)
    t, y = t[kept], y[kept]
    if len(t) < 3:
        return Drift(gauge, unit, float("nan"), 0.0, 0.0, limit)
    slope = slope_of(t, y)
    return Drift(gauge, unit, float(np.median(y)), slope * 3600, slope * float(t[-1] - t[0]), limit)


def slope_of(t: np.ndarray, y: np.ndarray) -> float:
    """The median slope of all pairs of points (Theil 1950, Sen 1968): up to 29 % of wild points don't move it."""
    chosen = np.unique(np.linspace(0, len(t) - 1, min(len(t), _MOST_POINTS)).astype(int))
    t, y = t[chosen], y[chosen]
    first, second = np.triu_indices(len(t), 1)
    return float(np.median((y[second] - y[first]) / (t[second] - t[first])))
