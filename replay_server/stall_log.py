"""Which waits are told in the log, and when: one line a period for each, and one when it is over. Told the time, never looks at a clock.

```
wait      ├────────── after ──────────┬──────── every ────────┬───── … ────┤
the log                               line                    line         recovered after N s
```

A wait that ends sooner leaves no line. A wait is one as long as it is told under the same key with the same beginning: progress, after
which the same client waits again, begins another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

_NS = 1_000_000_000
_EVERY = 6


@dataclass(frozen=True, slots=True)
class Stall:
    """``who`` has waited since ``since_ns``; ``why`` says for what, who is late and what to try. It is asked only for a line.

    ``key`` tells this wait from all others at a time.
    """

    key: str
    who: str
    since_ns: int
    why: Callable[[], str]


@dataclass(slots=True)
class _Told:
    stall: Stall
    at_ns: int


class StallLog:
    """What was told of each wait that lasts."""

    def __init__(self, after_ns: int) -> None:
        """A wait is told when it is ``after_ns`` old, and again every six times that."""
        self._after_ns = after_ns
        self._every_ns = _EVERY * after_ns
        self._told: dict[str, _Told] = {}

    def tell(self, stalls: Iterable[Stall], now_ns: int) -> list[str]:
        """The lines that are due, of all that waits at ``now_ns``."""
        waiting = {stall.key: stall for stall in stalls}
        lines = self._recovered(waiting, now_ns)
        for stall in waiting.values():
            age_ns = now_ns - stall.since_ns
            told = self._told.get(stall.key)
            if age_ns < self._after_ns or (told is not None and now_ns - told.at_ns < self._every_ns):
                continue
            self._told[stall.key] = _Told(stall, now_ns)
            lines.append(f"{stall.who} has waited for {age_ns / _NS:.1f} s: {stall.why()}")
        return lines

    def _recovered(self, waiting: dict[str, Stall], now_ns: int) -> list[str]:
        """Forgets the waits that are over."""
        lines = []
        for key, told in list(self._told.items()):
            still = waiting.get(key)
            if still is None or still.since_ns != told.stall.since_ns:
                del self._told[key]
                lines.append(f"{told.stall.who} recovered after {(now_ns - told.stall.since_ns) / _NS:.1f} s")
        return lines


class Repeats:
    """Counts what happens again and again to the same one, so that the first time is told at once and the others once a period."""

    def __init__(self, every_ns: int) -> None:
        self._every_ns = every_ns
        self._told: dict[int, tuple[int, int]] = {}  # when it was told, and how often it has happened since

    def note(self, key: int, now_ns: int) -> int | None:
        """It has happened once more: how often since it was told last, if that is to be told now."""
        at_ns, untold = self._told.get(key, (None, 0))
        if at_ns is not None and now_ns - at_ns < self._every_ns:
            self._told[key] = (at_ns, untold + 1)
            return None
        self._told[key] = (now_ns, 0)
        self._forget(now_ns)
        return untold + 1

    def _forget(self, now_ns: int) -> None:
        """Whom nothing has happened to for two periods is told anew."""
        for key, (at_ns, _) in list(self._told.items()):
            if now_ns - at_ns > 2 * self._every_ns:
                del self._told[key]
