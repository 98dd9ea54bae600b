"""The ring's memory: one small interface, a CPU and a CUDA implementation, one conformance suite.

One allocation holds the rows and whatever lies beside them:

```
| rows: ring_rows × stride | link: ring_rows × 8 | priority: ring_rows × 8 | proof cells |
```

The daemon only ever copies into it. Copies are submitted in order and complete in order; that one order carries the proofs of
docs/design.md, so an implementation has exactly one copy stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from replay_server_protocol.segment import Segment, align

PROOF_CELLS = 64
PROOF_BYTES = 64
_COLUMN_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Where rows and columns lie in the allocation, in bytes; ``link`` and ``priority`` are None when not kept."""

    ring_rows: int
    stride: int
    link: int | None
    priority: int | None
    proof: int
    alloc_bytes: int

    @classmethod
    def of(cls, ring_rows: int, stride: int, *, has_link: bool, has_priority: bool) -> RingLayout:
        end = align(ring_rows * stride, _COLUMN_ALIGNMENT)
        link = priority = None
        if has_link:
            link, end = end, align(end + 8 * ring_rows, _COLUMN_ALIGNMENT)
        if has_priority:
            priority, end = end, align(end + 8 * ring_rows, _COLUMN_ALIGNMENT)
        return cls(ring_rows, stride, link, priority, end, align(end + PROOF_CELLS * PROOF_BYTES))

    def proof_cell(self, ordinal: int) -> int:
        """Offset of the cell in which a learner's mapping is proved."""
        return self.proof + ordinal % PROOF_CELLS * PROOF_BYTES


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
