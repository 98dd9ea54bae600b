"""The ring's memory: one small interface, a CPU and a CUDA implementation, one conformance suite.

One allocation holds the rows and whatever lies beside them:

```
| rows: ring_rows × stride | link: ring_rows × 8 | priority: (ring_rows + 1) × 8 | overlay: (ring_rows + 1) × its stride | proof cells |
```

Learners write priority and overlay, the values of mutable fields. Each has a spare record at its end: a write of fixed shape sends there
what must not be written.

The daemon only ever copies into it. Copies are submitted in order and complete in order; that one order carries the proofs of
docs/design.md, so an implementation has exactly one copy stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from replay_server_protocol.errors import DeviceError
from replay_server_protocol.segment import Segment, align, segment_dir

PROOF_CELLS = 64
PROOF_BYTES = 64
_COLUMN_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Where rows and columns lie in the allocation, in bytes; a column that is not kept is None."""

    ring_rows: int
    stride: int
    link: int | None
    priority: int | None
    overlay: int | None
    overlay_stride: int
    proof: int
    alloc_bytes: int

    @classmethod
    def of(cls, ring_rows: int, stride: int, *, has_link: bool, has_priority: bool, overlay_stride: int = 0) -> RingLayout:
        end = align(ring_rows * stride, _COLUMN_ALIGNMENT)
        link = priority = overlay = None
        if has_link:
            link, end = end, align(end + 8 * ring_rows, _COLUMN_ALIGNMENT)
        if has_priority:
            priority, end = end, align(end + 8 * (ring_rows + 1), _COLUMN_ALIGNMENT)
        if overlay_stride:
            overlay, end = end, align(end + overlay_stride * (ring_rows + 1), _COLUMN_ALIGNMENT)
        return cls(ring_rows, stride, link, priority, overlay, overlay_stride, end, align(end + PROOF_CELLS * PROOF_BYTES))

    @property
    def bytes_per_row(self) -> int:
        """What one more row takes, with its place in the columns."""
        return self.stride + 8 * sum(offset is not None for offset in (self.link, self.priority)) + self.overlay_stride

    @property
    def columns(self) -> dict[str, int]:
        """Offsets of the columns that are kept."""
        offsets = {"link": self.link, "priority": self.priority, "overlay": self.overlay}
        return {name: offset for name, offset in offsets.items() if offset is not None}

    def proof_cell(self, ordinal: int) -> int:
        """Offset of the cell in which a learner's mapping is proved."""
        return self.proof + ordinal % PROOF_CELLS * PROOF_BYTES


def prove_rows(layout: RingLayout, write: Callable[[int, bytes], None], read: Callable[[int, int], bytes]) -> None:
    """Before a ring serves: writes its first, middle and last row, and only then reads them back, for offsets of too few bits make one row
    of two. Takes and gives offsets in the allocation; the bytes are zeros afterwards. Raises DeviceError that names the row.
    """
    n_bytes = min(layout.stride, PROOF_BYTES)
    rows = sorted({0, layout.ring_rows // 2, layout.ring_rows - 1})
    patterns = {row: os.urandom(n_bytes) for row in rows}
    for row, pattern in patterns.items():
        write(row * layout.stride, pattern)
    for row, pattern in patterns.items():
        if read(row * layout.stride, n_bytes) != pattern:
            raise DeviceError(
                f"row {row:,} of {layout.ring_rows:,}, at byte {row * layout.stride:,}, reads back other bytes than were written: this "
                "device can't hold so large a ring; lower --capacity, or serve with --storage host",
                row=row,
            )
    for row in rows:
        write(row * layout.stride, bytes(n_bytes))


class Copy(NamedTuple):
    """``n_bytes`` from a registered segment's ``address`` to ``offset`` in the allocation."""

    offset: int
    address: int
    n_bytes: int


class Write(NamedTuple):
    """Few bytes the server made itself; the implementation keeps what it must until they are copied."""

    offset: int
    content: bytes


@dataclass(frozen=True, slots=True)
class RingPlace:
    """What a learner needs to map the ring: the segment's name, or the CUDA IPC handle and the GPU's UUID."""

    storage: Literal["cpu", "cuda", "host"]
    handle: bytes
    device_uuid: str | None
    alloc_bytes: int

    @property
    def segments_unlinked(self) -> int:
        """1 when the segment's name was removed from outside: whoever has mapped it goes on, a learner that comes now can't."""
        return int(self.storage != "cuda" and not (segment_dir() / self.handle.decode()).exists())


class RingMemory(Protocol):
    """One allocation that outlives every learner's mapping of it."""

    place: RingPlace
    device_bytes: int
    host_bytes: int

    def register(self, segment: Segment) -> str:
        """Makes a collector's segment a source of copies. Returns how it is copied: "memory", "pinned", or "pageable: why"."""

    def unregister(self, segment: Segment) -> None:
        """After the last copy from the segment was seen complete."""

    def submit(self, copies: Sequence[Copy], writes: Sequence[Write] = ()) -> None:
        """Queues the copies, then the writes, as one ticket. Never waits for the device. Raises DeviceError."""

    def completed(self) -> int:
        """How many tickets were seen complete since the start; tickets complete in order. Raises DeviceError."""

    def close(self) -> None:
        """Ends submission and lets go of the memory, after every ticket is complete. An allocation that a learner may still map is
        left to the process's end."""
