"""How long a learner's thread leaves the interpreter to the caller who has just been lent a batch.

The caller launches an update then, and the device has nothing to do until the first of it arrives: every microsecond of the interpreter
that the thread takes is one that the device stands still. Some milliseconds later the caller is ahead of the device, or waits for it.
"""

from __future__ import annotations

from collections import deque

_MOST_NS = 5_000_000
_SHARE = 2  # of a tick, at most one part of so many
_TIMES_READY = 3  # so many times what a batch takes to get ready stay of the tick
_LATELY = 8  # of so many ticks the shortest counts, and of so many batches the one that took longest


class HeadStart:
    """Of one request. A tick is the time from a batch lent to the next call; before enough of them are known there is no head start, nor
    for as many after a call that had to wait.

    ``next_ns``: the next batch will hardly be asked for before that, however soon the caller comes; 0 where that isn't known.

    ``got_ready`` is called by whoever drives the conversation, the rest by the caller's thread.
    """

    def __init__(self) -> None:
        self.next_ns = 0
        self._lent_ns = 0
        self._ticks_ns = deque([0] * _LATELY, _LATELY)
        self._took_ns = deque([0] * _LATELY, _LATELY)
        self._ready_ns = 0  # the longest of them, told between the threads in one piece

    def call(self, now_ns: int) -> None:
        """The caller wants the next batch. Again, without one in between, after a call that raised: that is no tick."""
        if self._lent_ns:
            self._ticks_ns.append(now_ns - self._lent_ns)
            self._lent_ns = 0

    def was_late(self) -> None:
        """The call found no batch ready."""
        self._ticks_ns.extend([0] * _LATELY)

    def got_ready(self, duration_ns: int) -> None:
        """A batch was ready so long after it was asked for."""
        self._took_ns.append(duration_ns)
        self._ready_ns = max(self._took_ns)

    def lend(self, now_ns: int) -> int:
        """A batch is lent: when the thread may ask for the next one. No later than in 5 ms, and ``now_ns`` where that would be late."""
        self._lent_ns = now_ns
        tick_ns = min(self._ticks_ns)
        rest_ns = max(0, min(tick_ns // _SHARE, tick_ns - _TIMES_READY * self._ready_ns, _MOST_NS))
        self.next_ns = now_ns + tick_ns + rest_ns if rest_ns else 0
        return now_ns + rest_ns
