"""What a lost session leaves to the collector's next one, where servers pass rows on: publishes without a credit, and how they go on.

```
session 1   publishes 1 … 9 of the origin, credited through 6      lost ─► Remains(credited=6, kept=7, 8, 9)
session 2   kept 7, 8, 9 again, as slots are free, then 10, 11 …   its own numbers 1, 2, 3 … are the origin's less 6
```

An origin is one collector over all its sessions: its random name, and one row of numbers. Whoever has taken a number takes it no second
time, so it does not matter what became of a publish whose credit did not come.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from replay_server_protocol.messages import Publish, SegmentLent

from replay_server_client.episodes import LaneSums

_SAY_THE_SAME = ("schema", "moments", "nonfinite", "links", "finite", "return_gamma")
"""What a publish says of its rows depends on these of SEGMENT."""


@dataclass(frozen=True, slots=True)
class KeptPublish:
    """A publish and the bytes of its rows, which stay where the lost server had lent them: that memory lasts as long as this."""

    publish: Publish
    rows: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Remains:
    """``credited``: all publishes of ``origin`` up to this number are; ``kept`` are those after it, in order.

    ``committed`` is the newest credit's seq. ``masked`` rows were told by no publish yet, ``placed`` rows came before the next one, and
    ``sums`` go on along the lanes. ``lent``: the slots they were in, None before the first.
    """

    origin: str
    credited: int = 0
    kept: tuple[KeptPublish, ...] = ()
    committed: int = 0
    masked: int = 0
    placed: int = 0
    sums: LaneSums | None = None
    lent: SegmentLent | None = None

    @classmethod
    def of_nothing(cls) -> Remains:
        """A new origin."""
        return cls(secrets.token_hex(16))

    @property
    def rows(self) -> int:
        return sum(kept.publish.rows for kept in self.kept)

    def why_unfit(self, lent: SegmentLent) -> str | None:
        """Why they can't go on in these slots; None if they can."""
        before = self.lent
        if before is None:
            return None
        if not lent.resumes:
            return "has a ring of its own"
        most_rows = max((kept.publish.rows for kept in self.kept), default=0)
        if most_rows > lent.slot_rows:
            return f"lends slots of {lent.slot_rows:,} rows, and one of these had {most_rows:,}"
        other = next((name for name in _SAY_THE_SAME if getattr(before, name) != getattr(lent, name)), None)
        return None if other is None else f"has another {other}"
