"""How long processes were kept from running because the machine was busy with others: what a bound on waits must not count."""

from __future__ import annotations

import bisect
import contextlib
import os
import time
from collections.abc import Iterable

_EVERY_S = 0.02


class RunQueues:
    """Delays on the run queue of all threads of some processes (/proc/PID/task/TID/schedstat, second number), sampled now and then."""

    def __init__(self) -> None:
        self._samples: dict[int, tuple[list[float], list[float]]] = {}  # by pid: moments, and the delay up to each
        self._again_s = 0.0

    def sample(self, pids: Iterable[int]) -> None:
        """To be called often; looks only every 20 ms."""
        now_s = time.monotonic()
        if now_s < self._again_s:
            return
        self._again_s = now_s + _EVERY_S
        for pid in pids:
            moments, delays = self._samples.setdefault(pid, ([], []))
            moments.append(time.monotonic())
            delays.append(max(_delay_s(pid), delays[-1] if delays else 0.0))  # that of a thread goes with it

    def delayed_s(self, begin_s: float, end_s: float, *pids: int) -> float:
        """What these processes waited for a core between two moments, in sum; the samples around them count whole."""
        return sum(self._between(pid, begin_s, end_s) for pid in pids)

    def _between(self, pid: int, begin_s: float, end_s: float) -> float:
        moments, delays = self._samples.get(pid, ([], []))
        if not moments:
            return 0.0
        first = max(0, bisect.bisect_right(moments, begin_s) - 1)
        last = min(len(moments) - 1, bisect.bisect_left(moments, end_s))
        return max(0.0, delays[last] - delays[first])


def _delay_s(pid: int) -> float:
    delay_ns = 0
    with contextlib.suppress(OSError, IndexError):  # gone meanwhile, or a kernel that does not tell
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat", encoding="ascii") as stat:
                delay_ns += int(stat.read().split()[1])
    return delay_ns / 1e9
