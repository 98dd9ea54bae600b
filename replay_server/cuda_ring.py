"""The ring on the GPU: one raw allocation, one copy stream, one event a ticket.

```
submit ─► [waiting] ─► copies, writes, event on the stream ─► [in flight] ─► event seen done ─► completed
           only while no event or no staging room is free
```

After creation the daemon launches no kernel and allocates nothing on the device: events and the staging memory are made up front and
used again. Torch's allocator is never asked: what it hands out may be part of a larger block, which IPC would share as a whole.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from replay_server_protocol.errors import DeviceError
from replay_server_protocol.segment import Segment, align

from replay_server.cuda_runtime import CudaRuntime, Event, Stream
from replay_server.debug_hold import StreamHold
from replay_server.storage import Copy, RingLayout, RingPlace, Write, prove_rows

ALLOCATION_BYTES = 2 << 20
"""Smaller allocations may share a block, and a handle exports the whole block."""
STAGING_BYTES = 8 << 20
PROOF_STAGING_BYTES = 64 << 10
MAX_TICKETS = 1024
"""Tickets on the stream at once; more wait in line."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    copies: tuple[Copy, ...]
    writes: tuple[Write, ...]


class CudaRing:
    """RingMemory in device memory. ``address`` is the allocation's, in this process."""

    def __init__(self, runtime: CudaRuntime, address: int, place: RingPlace, copy_delay_s: float, staging_bytes: int) -> None:
        self.place = place
        self.device_bytes = place.alloc_bytes
        self.host_bytes = staging_bytes
        self.address = address
        self._runtime = runtime
        self._copy_delay_s = copy_delay_s
        self._stream: Stream = runtime.create_stream()
        self._hold = StreamHold(runtime, self._stream) if copy_delay_s else None
        self._events: list[Event] = [runtime.create_event() for _ in range(MAX_TICKETS)]
        self._staging = _Staging(runtime.allocate_pinned(staging_bytes), staging_bytes)
        self._pinned: set[int] = set()
        self._waiting: deque[_Waiting] = deque()
        self._launched = 0
        self._completed = 0
        self._is_open = True

    @classmethod
    def create(cls, ordinal: int, layout: RingLayout, *, runtime: CudaRuntime | None = None, copy_delay_s: float = 0.0) -> CudaRing:
        """Takes the memory on device ``ordinal``, zeroes the columns and proof cells (rows are read only once committed), proves the rows.

        Raises BudgetExceeded if the memory is not free, DeviceError for all else. ``copy_delay_s`` is for tests: each ticket stops on
        the stream for so long after the first half of its copies, so a reader who does not wait for the commit sees torn rows.
        """
        runtime = runtime or CudaRuntime.load()
        device = runtime.device(ordinal)
        alloc_bytes = align(layout.alloc_bytes, ALLOCATION_BYTES)
        address = runtime.allocate(alloc_bytes)
        rows_bytes = layout.ring_rows * layout.stride
        try:
            runtime.zero(address + rows_bytes, alloc_bytes - rows_bytes)
            runtime.synchronize()
            place = RingPlace("cuda", runtime.ipc_handle(address), device.uuid, alloc_bytes)
            staging_bytes = PROOF_STAGING_BYTES if layout.link is None else STAGING_BYTES
            ring = cls(runtime, address, place, copy_delay_s, staging_bytes)
        except BaseException:
            runtime.deallocate(address)  # nobody has its handle yet
            raise
        try:
            prove_rows(layout, ring._write, lambda offset, n_bytes: runtime.read(address + offset, n_bytes))
        except BaseException:
            ring.discard()
            raise
        return ring

    def register(self, segment: Segment) -> str:
        reason = self._runtime.pin(segment.address, segment.n_bytes)
        if reason is not None:
            return f"pageable: {reason}"
        self._pinned.add(segment.address)
        return "pinned"

    def unregister(self, segment: Segment) -> None:
        if segment.address in self._pinned:
            self._pinned.remove(segment.address)
            self._runtime.unpin(segment.address)

    def submit(self, copies: Sequence[Copy], writes: Sequence[Write] = ()) -> None:
        """As promised by RingMemory; one copy and its event cost about 4 µs.

        A ticket that finds no event or no staging room waits in line, and ``completed`` launches it.
        """
        if not self._is_open:
            raise DeviceError("the ring is closed: nothing can be copied into it any more")
        for copy in copies:
            self._check_range(copy.offset, copy.n_bytes)
        if writes:
            for write in writes:
                self._check_range(write.offset, len(write.content))
            if sum(len(write.content) for write in writes) > self._staging.n_bytes:
                raise DeviceError(f"the writes of one ticket have more than {self._staging.n_bytes:,} bytes; split the ticket")
        if self._waiting or not self._can_launch(writes):
            self._waiting.append(_Waiting(tuple(copies), tuple(writes)))
            return
        self._launch(copies, writes)

    def completed(self) -> int:
        while self._completed < self._launched and self._runtime.is_done(self._events[self._completed % MAX_TICKETS]):
            self._completed += 1
        self._staging.reclaim(self._completed)
        while self._waiting and self._can_launch(self._waiting[0].writes):
            ticket = self._waiting.popleft()
            self._launch(ticket.copies, ticket.writes)
        return self._completed

    def close(self) -> None:
        """Waits for copies on the stream, drops tickets that never got there, and leaves the allocation to the process's end."""
        if not self._is_open:
            return
        self._is_open = False
        self._waiting.clear()
        self._runtime.synchronize(self._stream)
        for address in self._pinned:
            self._runtime.unpin(address)
        self._pinned.clear()
        for event in self._events:
            self._runtime.destroy_event(event)
        if self._hold is not None:
            self._hold.close()
        self._runtime.destroy_stream(self._stream)
        self._runtime.deallocate_pinned(self._staging.address)

    def discard(self) -> None:
        """Closes and gives the memory back to the device: only where no other process has mapped it."""
        self.close()
        self._runtime.deallocate(self.address)

    def _write(self, offset: int, content: bytes) -> None:
        """Before the first ticket: waits for the copy."""
        ctypes.memmove(self._staging.address, content, len(content))
        self._runtime.copy(self.address + offset, self._staging.address, len(content), self._stream)
        self._runtime.synchronize(self._stream)

    def _can_launch(self, writes: Sequence[Write]) -> bool:
        return self._launched - self._completed < MAX_TICKETS and (not writes or self._staging.has_room(writes))

    def _launch(self, copies: Sequence[Copy], writes: Sequence[Write]) -> None:
        copy_async, base, stream = self._runtime.copy, self.address, self._stream
        if self._hold is not None:
            copies = self._hold_between_halves(copies, self._hold)
        for copy in copies:
            copy_async(base + copy.offset, copy.address, copy.n_bytes, stream)
        if writes:
            for write, staged in zip(writes, self._staging.keep(writes, self._launched + 1), strict=True):
                copy_async(base + write.offset, staged, len(write.content), stream)
        self._runtime.record(self._events[self._launched % MAX_TICKETS], stream)
        self._launched += 1

    def _hold_between_halves(self, copies: Sequence[Copy], hold: StreamHold) -> list[Copy]:
        """Submits the first half of each copy, then the delay; returns the other halves."""
        for copy in copies:
            if copy.n_bytes > 1:
                self._runtime.copy(self.address + copy.offset, copy.address, copy.n_bytes // 2, self._stream)
        hold.hold(self._copy_delay_s)
        halves = [(copy, copy.n_bytes // 2) for copy in copies]
        return [Copy(copy.offset + half, copy.address + half, copy.n_bytes - half) for copy, half in halves]

    def _check_range(self, offset: int, n_bytes: int) -> None:
        if offset < 0 or n_bytes < 0 or offset + n_bytes > self.device_bytes:
            raise DeviceError(f"bytes {offset:,} to {offset + n_bytes:,} lie outside the ring's {self.device_bytes:,}")


class _Staging:
    """A pinned ring for the bytes of writes: ``_head`` and ``_tail`` count bytes for ever, a ticket's bytes are one piece.

    A piece that would pass the end starts again at the front; the bytes it leaves unused go back with it.
    """

    def __init__(self, address: int, n_bytes: int = STAGING_BYTES) -> None:
        self.address = address
        self.n_bytes = n_bytes
        self._head = 0
        self._tail = 0
        self._kept: deque[tuple[int, int]] = deque()

    def has_room(self, writes: Sequence[Write]) -> bool:
        """A piece of the whole ring's size fits when nothing else is kept: the ring then starts over."""
        return not self._kept or self._place(writes)[1] - self._tail <= self.n_bytes

    def keep(self, writes: Sequence[Write], ticket: int) -> list[int]:
        """Copies the bytes in, to stay until ``ticket`` is complete; returns the address of each write's bytes."""
        if not self._kept:
            self._head = self._tail = 0
        start, self._head = self._place(writes)
        self._kept.append((ticket, self._head))
        addresses, address = [], self.address + start % self.n_bytes
        for write in writes:
            ctypes.memmove(address, write.content, len(write.content))
            addresses.append(address)
            address += len(write.content)
        return addresses

    def reclaim(self, completed: int) -> None:
        """Lets go of the bytes of every ticket up to ``completed``."""
        while self._kept and self._kept[0][0] <= completed:
            self._tail = self._kept.popleft()[1]

    def _place(self, writes: Sequence[Write]) -> tuple[int, int]:
        n_bytes = sum(len(write.content) for write in writes)
        start = self._head
        if start % self.n_bytes + n_bytes > self.n_bytes:
            start = align(start, self.n_bytes)
        return start, start + n_bytes
