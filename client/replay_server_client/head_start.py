"""How long a learner's thread leaves the interpreter to the caller who has just been lent a batch.

The caller launches an update then, and the device has nothing to do until the first of it arrives: every microsecond of the interpreter
that the thread takes is one that the device stands still. Some milliseconds later the caller is ahead of the device, or waits for it.
"""

from __future__ import annotations

_MOST_NS = 5_000_000
_SHARE = 2  # of a tick, at most one part of so many
_TIMES_READY = 3  # so many times what a batch takes to get ready stay of the tick
_SLOWLY = 8  # figures that would make it longer come in by one part of so many


class HeadStart:
    """Of one request. A tick is the time from a batch lent to the next call: the shortest counts lately; of getting ready the longest."""

    def __init__(self) -> None:
        self._lent_ns = 0
        self._tick_ns = 0
        self._ready_ns = 0

    def call(self, now_ns: int) -> None:
        """The caller wants the next batch."""
        if self._lent_ns:
            tick_ns = now_ns - self._lent_ns
            self._tick_ns = min(tick_ns, self._tick_ns + (tick_ns - self._tick_ns) // _SLOWLY)

    def make(self, duration_ns: int) -> None:
        """A batch was ready so long after it was asked for."""
        self._ready_ns = max(duration_ns, self._ready_ns + (duration_ns - self._ready_ns) // _SLOWLY)

    def lend(self, now_ns: int) -> int:
        """A batch is lent: when the thread may ask for the next one. No later than in 5 ms, and ``now_ns`` where that would be late."""
        self._lent_ns = now_ns
        return now_ns + max(0, min(self._tick_ns // _SHARE, self._tick_ns - _TIMES_READY * self._ready_ns, _MOST_NS))
