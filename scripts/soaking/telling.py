"""What a client of the soak tells its parent, and how: a pipe of its own, since a process killed while it holds a shared queue's lock
would silence all the others."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

_TELL_EVERY_S = 1.0
_MOST_WAITS = 2000
_MOST_FAULTS = 20


@dataclass
class News:
    """What happened since the last news. Waits are seconds spent inside ``write`` or ``sample``."""

    rows: int = 0
    calls: int = 0
    timeouts: int = 0
    sessions: int = 0
    letters: int = 0  # mailbox versions posted or received whole
    waits_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Teller:
    """The child's end. ``is_over`` becomes true when the parent says so or is gone."""

    def __init__(self, pipe: Connection, who: str) -> None:
        self.who = who
        self._pipe = pipe
        self._news = News()
        self._tell_at_s = time.monotonic() + _TELL_EVERY_S
        self._is_over = False

    def is_over(self) -> bool:
        if not self._is_over and self._pipe.poll(0):
            self._is_over = True
        return self._is_over

    def rest(self, seconds: float) -> bool:
        """Waits, or until it is over; returns whether it is."""
        self.tell()
        self._is_over = self._is_over or self._pipe.poll(seconds)
        return self._is_over

    def count(self, **more: int) -> None:
        for name, by in more.items():
            setattr(self._news, name, getattr(self._news, name) + by)

    def done(self, begin_s: float, rows: int) -> None:
        """A call that began at ``begin_s`` (monotonic) has handled ``rows`` rows."""
        news = self._news
        news.calls += 1
        news.rows += rows
        if len(news.waits_s) < _MOST_WAITS:
            news.waits_s.append(time.monotonic() - begin_s)
        self.tell()

    def fault(self, what: Any) -> None:
        if len(self._news.faults) < _MOST_FAULTS:
            self._news.faults.append(f"{self.who}: {what}")

    def tell(self, *, now: bool = False) -> None:
        """Sends the news, at most once a second unless ``now``."""
        if now or time.monotonic() >= self._tell_at_s:
            self._pipe.send(self._news)
            self._news = News()
            self._tell_at_s = time.monotonic() + _TELL_EVERY_S
