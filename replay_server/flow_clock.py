"""How long flow control was in each state: sums from the server's start and over the last minute. Told the time, never looks at a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

_NS = 1_000_000_000
WINDOW_NS = 60 * _NS
_NOTE_EVERY_NS = _NS


@dataclass(frozen=True, slots=True)
class TimeInStates:
    """``since_s``: seconds in the present state. ``total_s`` adds up to the time since the start, ``recent_s`` to the last minute.

    The last minute is 60 s, and up to a second or to the loop's longest turn more; less while the server is younger.
    """

    since_s: float
    total_s: dict[str, float]
    recent_s: dict[str, float]


class FlowClock:
    """The loop says at each turn which state flow is in; a state lasts until the turn that says another.

    ```
    noted    ├──┤──┤──┤── … ──┤──┤   sums once a second, the last 60 s of them
                 └─ oldest ──────────► now: the last minute is the difference of two sums
    ```
    """

    def __init__(self, states: Iterable[str], state: str, now_ns: int) -> None:
        """Starts at ``now_ns`` in ``state``, one of ``states``."""
        self.state = state
        self.since_ns = now_ns
        self._told_ns = now_ns
        self._total_ns = dict.fromkeys(states, 0)
        self._noted: deque[tuple[int, dict[str, int]]] = deque([(now_ns, dict(self._total_ns))])

    def tell(self, state: str, now_ns: int) -> None:
        """``state`` holds from ``now_ns`` on. Costs next to nothing while it stays the same."""
        if state == self.state and now_ns - self._noted[-1][0] < _NOTE_EVERY_NS:
            return
        self._count(now_ns)
        if state != self.state:
            self.state, self.since_ns = state, now_ns
        if now_ns - self._noted[-1][0] >= _NOTE_EVERY_NS:
            self._noted.append((now_ns, dict(self._total_ns)))
            self._forget(now_ns)

    def statistics(self, now_ns: int) -> TimeInStates:
        self._count(now_ns)
        self._forget(now_ns)
        _, oldest = self._noted[0]
        return TimeInStates(
            since_s=(now_ns - self.since_ns) / _NS,
            total_s={state: total / _NS for state, total in self._total_ns.items()},
            recent_s={state: (total - oldest[state]) / _NS for state, total in self._total_ns.items()},
        )

    def _count(self, now_ns: int) -> None:
        self._total_ns[self.state] += now_ns - self._told_ns
        self._told_ns = now_ns

    def _forget(self, now_ns: int) -> None:
        """Keeps one sum that is a minute old, or the first of all, and what came after it."""
        while len(self._noted) > 1 and now_ns - self._noted[1][0] >= WINDOW_NS:
            self._noted.popleft()
