"""The ring in shared host memory: for machines without a GPU, for rings larger than one (``--storage host``), and for MPS.

The server's thread copies, so a ticket is complete when ``submit`` returns, unless a test asked for a delay.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from replay_server_protocol.errors import DeviceError
from replay_server_protocol.segment import Segment, segment_name

from replay_server.storage import Copy, RingLayout, RingPlace, Write, prove_rows


@dataclass(frozen=True, slots=True)
class _Delayed:
    """A ticket whose copies are half done until ``due_s``."""

    due_s: float
    copies: tuple[Copy, ...]
    writes: tuple[Write, ...]


class CpuRing:
    """RingMemory in one named segment, which keeps its name until ``close`` so that learners may map it at any time."""

    def __init__(self, segment: Segment, storage: Literal["cpu", "host"], copy_delay_s: float) -> None:
        self.place = RingPlace(storage, segment.name.encode(), None, segment.n_bytes)
        self.device_bytes = 0
        self.host_bytes = segment.n_bytes
        self._segment = segment
        self._copy_delay_s = copy_delay_s
        self._delayed: deque[_Delayed] = deque()
        self._completed = 0
        self._is_open = True

    @classmethod
    def create(cls, run_id: str, layout: RingLayout, *, storage: Literal["cpu", "host"] = "cpu", copy_delay_s: float = 0.0) -> CpuRing:
        """Makes the segment, zeroed, and proves its rows. Raises BudgetExceeded if the file system has no room.

        ``copy_delay_s`` is for tests: the first half of each copy is made at submission, the rest and the writes when ``completed``
        is called that much later, so that a reader who does not wait for the commit sees torn rows.
        """
        ring = cls(Segment.create(segment_name(run_id, "ring"), layout.alloc_bytes), storage, copy_delay_s)
        try:
            prove_rows(layout, ring._write, ring._read)
        except BaseException:
            ring.close()
            raise
        return ring

    def register(self, segment: Segment) -> str:
        return "memory"

    def unregister(self, segment: Segment) -> None:
        pass

    def submit(self, copies: Sequence[Copy], writes: Sequence[Write] = ()) -> None:
        if not self._is_open:
            raise DeviceError("the ring is closed: nothing can be copied into it any more")
        for copy in copies:
            self._check_range(copy.offset, copy.n_bytes)
        for write in writes:
            self._check_range(write.offset, len(write.content))
        if self._copy_delay_s:
            for copy in copies:
                self._move(copy.offset, copy.address, copy.n_bytes // 2)
            self._delayed.append(_Delayed(time.monotonic() + self._copy_delay_s, tuple(copies), tuple(writes)))
        else:
            for copy in copies:
                self._move(copy.offset, copy.address, copy.n_bytes)
            self._finish(writes)

    def completed(self) -> int:
        while self._delayed and self._delayed[0].due_s <= time.monotonic():
            ticket = self._delayed.popleft()
            for copy in ticket.copies:
                half = copy.n_bytes // 2
                self._move(copy.offset + half, copy.address + half, copy.n_bytes - half)
            self._finish(ticket.writes)
        return self._completed

    def close(self) -> None:
        """Removes the name and unmaps; learners' mappings stay readable. Tickets still delayed are dropped."""
        self._is_open = False
        self._delayed.clear()
        self._segment.unlink()
        self._segment.close()

    def _check_range(self, offset: int, n_bytes: int) -> None:
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.host_bytes:
            raise DeviceError(f"bytes {offset:,} to {offset + n_bytes:,} lie outside the ring's {self.host_bytes:,}")

    def _write(self, offset: int, content: bytes) -> None:
        ctypes.memmove(self._segment.address + offset, content, len(content))

    def _read(self, offset: int, n_bytes: int) -> bytes:
        return ctypes.string_at(self._segment.address + offset, n_bytes)

    def _move(self, offset: int, address: int, n_bytes: int) -> None:
        ctypes.memmove(self._segment.address + offset, address, n_bytes)

    def _finish(self, writes: Sequence[Write]) -> None:
        for write in writes:
            self._write(write.offset, write.content)
        self._completed += 1
