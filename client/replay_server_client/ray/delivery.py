"""Which publishes go into which chunk, when a chunk may be sent, and what is sent again: the sender's side of exactly-once delivery.

```
offer ─► waiting ─► chunk (>= 1 MiB, or nothing else on its way, or waited long enough) ─► in flight, at most W ─► settle
                      ▲                                                                                              │
                      └── an answer that leaves something out, or none: once all in flight are settled, all again ◄──┘
```

A publish is (origin, number): a collector and its number there. The receiver answers a chunk with the number through which
each origin is committed; a call that failed has no answer, whatever became of it. Either way all that is not known to be committed is
sent again, in order, under its old numbers (go-back-N), and ``first`` says where the answers end. With the receiver's table
(``replay_server_protocol.origins``) each is committed once.

Pure: no socket, no clock of its own, no Ray. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")

WINDOW_CHUNKS = 4
CHUNK_BYTES = 1 << 20
LINGER_S = 0.005
_RETRY_S = (0.05, 1.0)


@dataclass(frozen=True, slots=True)
class Part(Generic[P]):
    """One publish of one origin; ``content`` is whatever the sender needs to send it."""

    origin: str
    number: int
    n_bytes: int
    content: P


@dataclass(frozen=True, slots=True)
class Chunk(Generic[P]):
    """Parts that travel in one call. ``firsts``: for each origin in it the first number that had no answer when it was sent."""

    ordinal: int
    parts: Sequence[Part[P]]
    firsts: Mapping[str, int]

    @property
    def n_bytes(self) -> int:
        return sum(part.n_bytes for part in self.parts)


class Delivery(Generic[P]):
    """Parts on their way to one receiver, in the order in which they were offered."""

    def __init__(self, window_chunks: int = WINDOW_CHUNKS, chunk_bytes: int = CHUNK_BYTES, linger_s: float = LINGER_S) -> None:
        self.window_chunks = window_chunks
        self.chunk_bytes = chunk_bytes
        self.linger_s = linger_s
        self.chunks_sent = 0
        self.parts_sent_again = 0
        self._unanswered: deque[Part[P]] = deque()  # the first ``_sent`` of them are in flight, or were
        self._sent = 0
        self._waiting_bytes = 0
        self._in_flight: dict[int, Chunk[P]] = {}
        self._through: dict[str, int] = {}
        self._must_go_back = False
        self._failures = 0
        self._waiting_since_s = 0.0
        self._retry_at_s = 0.0

    @property
    def in_flight(self) -> int:
        """Chunks."""
        return len(self._in_flight)

    @property
    def unanswered(self) -> int:
        """Parts."""
        return len(self._unanswered)

    @property
    def origins(self) -> int:
        return len(self._through)

    def offer(self, part: Part[P], now_s: float) -> None:
        """Takes the next part of its origin: numbers follow one another, but for those that a collector offers again after a loss."""
        if part.origin not in self._through:
            self._through[part.origin] = part.number - 1
        if self._sent == len(self._unanswered):
            self._waiting_since_s = now_s
        self._unanswered.append(part)
        self._waiting_bytes += part.n_bytes

    def next_chunk(self, now_s: float) -> Chunk[P] | None:
        """What to send now; None while nothing waits, the window is full, it pays to gather more, or a failure is waited out."""
        if self._must_go_back or self._sent == len(self._unanswered) or len(self._in_flight) >= self.window_chunks:
            return None
        if now_s < self.next_at_s():
            return None
        parts: list[Part[P]] = []
        n_bytes = 0
        while self._sent < len(self._unanswered) and n_bytes < self.chunk_bytes:
            part = self._unanswered[self._sent]
            parts.append(part)
            n_bytes += part.n_bytes
            self._sent += 1
        self._waiting_bytes -= n_bytes
        self._waiting_since_s = now_s
        self.chunks_sent += 1
        firsts: dict[str, int] = {}
        for part in parts:  # one offered again may have been answered meanwhile, by a call of a forwarder that is gone
            firsts[part.origin] = min(firsts.get(part.origin, self._through[part.origin] + 1), part.number)
        chunk = Chunk(self.chunks_sent, parts, firsts)
        self._in_flight[chunk.ordinal] = chunk
        return chunk

    def next_at_s(self) -> float:
        """From when on what waits may go, if the window has room."""
        if self._waiting_bytes >= self.chunk_bytes or not self._in_flight:
            return self._retry_at_s
        return max(self._retry_at_s, self._waiting_since_s + self.linger_s)

    def settle(self, ordinal: int, through: Mapping[str, int] | None, now_s: float) -> list[Part[P]]:
        """A call has ended: ``through`` is its answer, None if it failed. Returns the parts now known to be committed, in order."""
        chunk = self._in_flight.pop(ordinal)
        for origin, number in (through or {}).items():
            if number > self._through.get(origin, number):
                self._through[origin] = number
        if any(part.number > self._through.get(part.origin, part.number) for part in chunk.parts):
            self._must_go_back = True
            self._failures += through is None  # who answers has waited for credits as long as it likes: no reason to wait longer here
        elif not self._must_go_back:
            self._failures = 0
        committed = self._take_answered()
        if committed:
            self._failures = min(self._failures, 1)  # it goes on, if slowly
        if self._must_go_back and not self._in_flight:
            self._go_back(now_s)
        return committed

    def forget(self, origin: str) -> None:
        """No more parts of this origin are offered; those on their way go on."""
        if not any(part.origin == origin for part in self._unanswered):
            self._through.pop(origin, None)

    def _take_answered(self) -> list[Part[P]]:
        committed, kept = [], deque[Part[P]]()
        for place, part in enumerate(self._unanswered):
            if part.number <= self._through[part.origin]:
                committed.append(part)
                if place >= self._sent:  # answered by a call that was given up, after it went back into the queue
                    self._waiting_bytes -= part.n_bytes
            else:
                kept.append(part)
        sent_before = self._sent
        self._sent = sum(part.number > self._through[part.origin] for place, part in enumerate(self._unanswered) if place < sent_before)
        self._unanswered = kept
        return committed

    def _go_back(self, now_s: float) -> None:
        shortest, longest = _RETRY_S
        self._retry_at_s = now_s + min(longest, shortest * 2 ** max(0, min(self._failures - 1, 10)))
        self.parts_sent_again += self._sent
        self._sent = 0
        self._waiting_bytes = sum(part.n_bytes for part in self._unanswered)
        self._must_go_back = False
