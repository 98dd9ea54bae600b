"""Running moments of single numbers, merged part by part in plain Python: on the path of every slot."""

from __future__ import annotations

import math
import sys


class Running:
    """Count, mean, spread and range of all parts merged; the formula is that of ``Moments.merge``."""

    __slots__ = ("_high", "_low", "_mean", "_squares", "count")

    def __init__(self) -> None:
        self.count, self._mean, self._squares, self._low, self._high = 0, 0.0, 0.0, math.inf, -math.inf

    def merge(self, count: int, mean: float, squares: float, low: float, high: float) -> None:
        if count == 0:
            return
        total = self.count + count
        delta = mean - self._mean
        self._squares += squares + delta * delta * (self.count * count / total)
        self._mean += delta * (count / total)
        self._low, self._high, self.count = min(self._low, low), max(self._high, high), total

    @property
    def parts(self) -> tuple[int, float, float, float, float] | None:
        """What ``merge`` into an empty one makes this again from; None before the first number."""
        if not self.count:
            return None
        return self.count, self._mean, min(self._squares, sys.float_info.max), self._low, self._high

    def report(self) -> dict[str, float | None]:
        """mean, std, min, max; None before the first number, and for a spread beyond float64."""
        if not self.count:
            return {"mean": None, "std": None, "min": None, "max": None}
        return {"mean": finite(self._mean), "std": finite((self._squares / self.count) ** 0.5), "min": self._low, "max": self._high}


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return float(value) if math.isfinite(value) else None
