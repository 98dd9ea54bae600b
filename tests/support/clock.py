"""A clock that only moves when told to: deadlines and lingering are tested to the nanosecond, without waiting."""

from __future__ import annotations

_NS = 1_000_000_000


class FakeClock:
    """Stands in for ``time.monotonic`` and ``time.monotonic_ns``; calling it reads seconds."""

    def __init__(self, start_ns: int = 1_000 * _NS) -> None:
        self._now_ns = start_ns

    def __call__(self) -> float:
        return self._now_ns / _NS

    @property
    def now_ns(self) -> int:
        return self._now_ns

    def monotonic_ns(self) -> int:
        return self._now_ns

    def advance(self, seconds: float) -> None:
        self.advance_ns(round(seconds * _NS))

    def advance_ns(self, n_ns: int) -> None:
        if n_ns < 0:
            raise ValueError(f"a monotonic clock never goes back, not even by {-n_ns} ns")
        self._now_ns += n_ns
