"""The one fixed piece of host memory that rows are copied into before anybody looks at them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

BOUNCE_BYTES = 4 << 20
"""About a millisecond of copying on a slow host: far below any lease, and nothing beside a ring."""


class Bounce(Protocol):
    """``memory`` is ``uint8[n]``; a copy is in it once ``finish`` has returned."""

    memory: npt.NDArray[np.uint8]

    def copy(self, offset: int, n_bytes: int, at: int) -> None:
        """Queues the copy of bytes from ``offset`` in the ring's allocation to ``at`` in ``memory``."""

    def finish(self) -> None:
        """Waits until every copy is complete."""


class HostBounce:
    """Copies out of a ring in host memory, ``allocation`` being ``uint8[alloc_bytes]``; each is complete at once."""

    def __init__(self, allocation: npt.NDArray[np.uint8], n_bytes: int) -> None:
        self.memory = np.empty(n_bytes, np.uint8)
        self._allocation = allocation

    def copy(self, offset: int, n_bytes: int, at: int) -> None:
        self.memory[at : at + n_bytes] = self._allocation[offset : offset + n_bytes]

    def gather(self, offset: int, n_bytes: int, indices: npt.NDArray[np.int64], at: int) -> None:
        """Copies the records ``indices`` of a column at ``offset`` in one go: many rows that are no neighbours."""
        column = self._allocation[offset : offset + n_bytes * (int(indices.max()) + 1)].reshape(-1, n_bytes)
        to = self.memory[at : at + n_bytes * len(indices)].reshape(-1, n_bytes)
        np.take(column, indices, axis=0, out=to, mode="clip")  # "raise" would go through a copy of its own

    def finish(self) -> None:
        return


def bounce_bytes(record_bytes: int) -> int:
    """BOUNCE_BYTES, or what one row and its side columns take if that is more."""
    return max(BOUNCE_BYTES, record_bytes)
