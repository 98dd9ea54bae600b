"""The ring's arithmetic: which rows are whose. Integers in, integers out.

```
seq    0 …            tail                committed            reserved
       | overwritten   |  window: sampled  | spans being copied  | not yet anybody's
                       |<- size ≤ capacity->|
index = seq % ring_rows,   ring_rows = capacity + headroom
```

A span may be reserved iff the rows it will overwrite, those before ``reserved + n - ring_rows``, are neither in the window nor under a
lease: ``reserved + n - ring_rows <= floor``, ``floor = min(tail, oldest tail among open leases)``.
"""

from __future__ import annotations

from typing import NamedTuple

from replay_server_protocol.errors import ProtocolViolation


class Span(NamedTuple):
    """The rows ``[first_seq, end_seq)`` of one slot."""

    first_seq: int
    rows: int

    @property
    def end_seq(self) -> int:
        return self.first_seq + self.rows


class Ring:
    """Counts reserved and committed rows; ``reserved`` and ``committed`` are seqs and never go back."""

    def __init__(self, capacity: int, headroom: int) -> None:
        self.capacity = capacity
        self.headroom = headroom
        self.ring_rows = capacity + headroom
        self.reserved = 0
        self.committed = 0
        self._first_seq = 0  # there is none before it: 0, or the oldest row of what was restored

    @property
    def tail(self) -> int:
        """The oldest seq that can be sampled."""
        return max(self._first_seq, self.committed - self.capacity)

    @property
    def size(self) -> int:
        return self.committed - self.tail

    @property
    def in_flight(self) -> int:
        """Rows reserved and not yet committed."""
        return self.reserved - self.committed

    @property
    def oldest_owned_seq(self) -> int:
        """The oldest seq whose ring row no reserved span has taken over."""
        return max(self._first_seq, self.reserved - self.ring_rows)

    def floor(self, oldest_lease_tail: int | None) -> int:
        tail = self.committed - self.capacity
        if oldest_lease_tail is not None and oldest_lease_tail < tail:
            return oldest_lease_tail
        return tail if tail > self._first_seq else self._first_seq

    def missing_rows(self, rows: int, oldest_lease_tail: int | None) -> int:
        """How many rows the floor must rise before a span of ``rows`` fits; 0 when it fits now."""
        missing = self.reserved + rows - self.ring_rows - self.floor(oldest_lease_tail)
        return missing if missing > 0 else 0

    def reserve(self, rows: int, oldest_lease_tail: int | None) -> Span:
        """Takes the next ``rows`` rows. Raises ProtocolViolation, and changes nothing, if they don't fit now."""
        if self.missing_rows(rows, oldest_lease_tail):
            raise ProtocolViolation(f"a span of {rows} rows doesn't fit behind seq {self.reserved}")
        span = Span(self.reserved, rows)
        self.reserved = span.end_seq
        return span

    def restore(self, first_seq: int, committed: int) -> None:
        """Begins with the rows [first_seq, committed), at most ``capacity`` of them. Raises ProtocolViolation once it was used."""
        if self.reserved or not 0 <= first_seq <= committed <= first_seq + self.capacity:
            raise ProtocolViolation(f"rows {first_seq} to {committed} are no window to begin a ring of {self.capacity} rows with")
        self._first_seq = first_seq
        self.reserved = self.committed = committed

    def commit(self, span: Span) -> None:
        """Makes a span's rows visible. Raises ProtocolViolation unless it is the oldest span not committed."""
        if span.first_seq != self.committed or span.end_seq > self.reserved:
            raise ProtocolViolation(f"span [{span.first_seq}, {span.end_seq}) is not next: committed is {self.committed}")
        self.committed = span.end_seq

    def pieces(self, first_seq: int, rows: int) -> list[tuple[int, int]]:
        """(ring index, rows) of consecutive seqs, split where the ring wraps; at most two, since no span is longer than the ring."""
        index = first_seq % self.ring_rows
        until_wrap = self.ring_rows - index
        if rows <= until_wrap:
            return [(index, rows)] if rows else []
        return [(index, until_wrap), (0, rows - until_wrap)]
