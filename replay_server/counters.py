"""What the server counts from its start: sums that only rise, waits of the last moments, rates of the last seconds, running moments."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.moments import SCALARS, Moments, Scalars
from replay_server_protocol.schema import PlacedField

from replay_server.running import Running, finite

_LATENCIES_KEPT = 2048
_RATE_WINDOW_S = 5.0
_FIRST_BITS, _LAST_BITS = 10, 34

WAIT_BOUNDS_S = tuple(2**bits / 1e9 for bits in range(_FIRST_BITS, _LAST_BITS + 1))
"""Upper bounds of a latency's buckets: 1.024 µs, doubled up to 17 s; one more bucket holds what took longer."""


@dataclass(slots=True)
class Counters:
    """Conservation: ``rows_published = rows_committed + rows_rejected + rows_lost + rows in flight``; masked rows never count as published.

    ``rows_lost`` are rows that died with an earlier generation of this name, as their collectors reported them.
    """

    rows_published: int = 0
    rows_committed: int = 0
    rows_rejected: int = 0
    rows_masked: int = 0
    rows_lost: int = 0
    nonfinite_rows: int = 0
    stale_messages: int = 0
    bad_messages: int = 0
    connections_refused: int = 0
    leases_revoked: int = 0
    batches_granted: int = 0
    batches_dropped: int = 0
    sessions_opened: int = 0
    sessions_lost: int = 0


class Latency:
    """The last waits of one kind, in ns, and how many of all fell between two powers of two: a bit length is a bucket's number."""

    def __init__(self) -> None:
        self._kept: deque[int] = deque(maxlen=_LATENCIES_KEPT)
        self._of_bits = [0] * 65
        self._sum_ns = 0

    def note(self, waited_ns: int) -> None:
        """``waited_ns`` is not negative and below 2**64."""
        self._kept.append(waited_ns)
        self._of_bits[waited_ns.bit_length()] += 1
        self._sum_ns += waited_ns

    def histogram(self) -> dict[str, object]:
        """All waits so far: their sum in seconds, and one count for each of WAIT_BOUNDS_S and for what is above."""
        below, above = self._of_bits[: _FIRST_BITS + 1], self._of_bits[_LAST_BITS + 1 :]
        counts = [sum(below), *self._of_bits[_FIRST_BITS + 1 : _LAST_BITS + 1], sum(above)]
        return {"sum_s": self._sum_ns / 1e9, "counts": counts}

    def percentiles_us(self) -> dict[str, float | None]:
        """p50 and p99 in microseconds; None before the first."""
        ordered = sorted(self._kept)
        if not ordered:
            return {"p50": None, "p99": None}
        return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] / 1000 for p in (50, 99)}


class Rates:
    """Rates over the last seconds, from ``kinds`` sums noted now and then."""

    def __init__(self, kinds: int = 2) -> None:
        self._kinds = kinds
        self._noted: deque[tuple[float, tuple[int, ...]]] = deque()

    def note(self, now_s: float, *sums: int) -> None:
        self._noted.append((now_s, sums))
        while len(self._noted) > 2 and now_s - self._noted[1][0] >= _RATE_WINDOW_S:
            self._noted.popleft()

    def begin(self, now_s: float, *sums: int) -> None:
        """Starts from sums that came at once and are no traffic, as those of a snapshot."""
        self._noted.clear()
        self.note(now_s, *sums)

    def per_second(self) -> tuple[float, ...]:
        """One rate a sum; zeros before the first note."""
        if not self._noted:
            return (0.0,) * self._kinds
        (first_s, first), (last_s, last) = self._noted[0], self._noted[-1]
        span_s = max(last_s - first_s, 1e-9)
        return tuple((b - a) / span_s if last_s > first_s else 0.0 for a, b in zip(first, last, strict=True))


class Tally:
    """Running moments of one field, merged from packed ones. A scalar field takes a short way: it is on the path of every slot."""

    def __init__(self, field: PlacedField) -> None:
        self.field = field
        self.moments = Moments.empty(field.elements)
        self._scalar = Running()

    def read(self, packed: bytes) -> bytes | Scalars:
        """What ``merge`` adds: of many elements as it came, for it may wait long. Raises ProtocolViolation if ``packed`` can't be moments
        of this field."""
        if self.field.elements > 1 or len(packed) != SCALARS.size:
            Moments.unpack(packed, self.field.elements)
            return packed
        scalars: Scalars = SCALARS.unpack(packed)
        count, mean, squares, low, high = scalars
        if count and not (math.isfinite(mean) and 0 <= squares < math.inf and -math.inf < low <= high < math.inf):
            raise ProtocolViolation(f"moments of {self.field.name!r} must be finite, with squares >= 0 and low <= high")
        return scalars

    def merge(self, part: bytes | Scalars) -> None:
        """Adds moments of this field, as ``read`` gave them."""
        if isinstance(part, bytes):
            self.moments.merge(Moments.unpack(part, self.field.elements))
        else:
            self._scalar.merge(*part)

    def pack(self) -> bytes:
        """From what ``read`` makes of it ``merge`` into an empty tally makes this one again."""
        if self.field.elements > 1:
            return self.moments.pack()
        return SCALARS.pack(*(self._scalar.parts or (0, 0.0, 0.0, 0.0, 0.0)))

    def report(self) -> dict[str, object]:
        """count, mean, std, min, max: numbers for a scalar field, lists per element otherwise, null before the first row."""
        if self.field.elements > 1:
            m = self.moments
            values = (m.mean, m.std, m.low, m.high)
            mean, std, low, high = ([finite(x) for x in part] if m.count else None for part in values)
            return {"count": m.count, "mean": mean, "std": std, "min": low, "max": high}
        return {"count": self._scalar.count, **self._scalar.report()}
