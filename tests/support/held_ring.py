"""A ring memory whose copies complete when the test says so: an Ingress can be driven step by step, without a server."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from replay_server_protocol.messages import PROTOCOL_VERSION, Hello, Publish
from replay_server_protocol.schema import Schema
from replay_server_protocol.segment import Segment

from replay_server.counters import Counters, Tally
from replay_server.credit import Credits
from replay_server.flow import Flow
from replay_server.ingress import Ingress
from replay_server.leases import Leases
from replay_server.metadata import Metadata, Notes
from replay_server.ring import Ring
from replay_server.sessions import CollectorSession
from replay_server.storage import Copy, RingLayout, RingPlace, Write

ROWS = Schema.of(value="int64", reward="float32")


class HeldRing:
    """A RingMemory in this process's memory. ``complete(n)`` carries out n tickets in order; none is ever carried out before that."""

    def __init__(self, layout: RingLayout) -> None:
        self.bytes: npt.NDArray[np.uint8] = np.zeros(layout.alloc_bytes, np.uint8)
        self.place = RingPlace("cpu", b"held", None, layout.alloc_bytes)
        self.device_bytes, self.host_bytes = 0, layout.alloc_bytes
        self.held: list[tuple[tuple[Copy, ...], tuple[Write, ...]]] = []
        self._completed = 0

    def register(self, segment: Segment) -> str:
        return "memory"

    def unregister(self, segment: Segment) -> None:
        pass

    def submit(self, copies: Sequence[Copy], writes: Sequence[Write] = ()) -> None:
        self.held.append((tuple(copies), tuple(writes)))

    def complete(self, tickets: int) -> None:
        for _ in range(min(tickets, len(self.held))):
            copies, writes = self.held.pop(0)
            for copy in copies:
                content = np.frombuffer(ctypes.string_at(copy.address, copy.n_bytes), np.uint8)
                self.bytes[copy.offset : copy.offset + copy.n_bytes] = content
            for write in writes:
                self.bytes[write.offset : write.offset + len(write.content)] = np.frombuffer(write.content, np.uint8)
            self._completed += 1

    def completed(self) -> int:
        return self._completed

    def close(self) -> None:
        pass


class Bench:
    """An Ingress over a HeldRing, with collectors whose slots the test fills."""

    def __init__(
        self, capacity: int, headroom: int, *, has_link: bool = False, flow: Flow | None = None, keeps_moments: bool = False
    ) -> None:
        self.ring = Ring(capacity, headroom)
        self.layout = RingLayout.of(self.ring.ring_rows, ROWS.stride, has_link=has_link, has_priority=False)
        self.memory = HeldRing(self.layout)
        self.flow = flow or Flow()
        self.leases = Leases(1000)
        self.counters = Counters()
        self.tallies = [Tally(ROWS["reward"])] if keeps_moments else []
        self.metadata = Metadata(self.tallies, Notes(has_episodes=True, has_versions=True), lambda mailbox: self.newest_version)
        self.newest_version: int | None = None
        self.ingress = Ingress(self.ring, self.memory, self.layout, self.flow, self.leases, self.metadata, self.counters)
        self._collectors = 0

    def collector(self, slot_rows: int, depth: int = 2, *, lanes: int = 1, counted: bool = True) -> CollectorSession:
        self._collectors += 1
        hello = Hello(PROTOCOL_VERSION, 1, "collector", f"c{self._collectors}", 1, 0, 0, None, None, lanes, counted, 0, None)
        slot_bytes = slot_rows * ROWS.stride
        segment = Segment("held", depth * slot_bytes, mmap.mmap(-1, depth * slot_bytes))
        return CollectorSession(
            token=self._collectors,
            identity=b"",
            hello=hello,
            ordinal=self._collectors,
            heard_s=0,
            slot_rows=slot_rows,
            slot_bytes=slot_bytes,
            segment=segment,
            credits=Credits(depth),
        )

    def fill(self, collector: CollectorSession, slot: int, values: Sequence[int]) -> None:
        assert collector.segment is not None
        start = slot * collector.slot_bytes
        rows = collector.segment.bytes[start : start + collector.slot_bytes].reshape(-1, ROWS.stride)
        ROWS["value"].view(rows)[: len(values)] = values

    def values(self, first_seq: int, end_seq: int) -> list[int]:
        """What lies in the ring's rows of these seqs."""
        rows = self.memory.bytes[: self.ring.ring_rows * ROWS.stride].reshape(-1, ROWS.stride)
        column = ROWS["value"].view(rows)
        return [int(column[seq % self.ring.ring_rows]) for seq in range(first_seq, end_seq)]

    def link(self, seq: int) -> int:
        assert self.layout.link is not None
        column = self.memory.bytes[self.layout.link : self.layout.link + 8 * self.ring.ring_rows].view(np.int64)
        return int(column[seq % self.ring.ring_rows])


def publish(
    number: int, slot: int, rows: int, *, rejected: int = 0, masked: int = 0, lanes: bytes = b"", moments: Sequence[bytes] = ()
) -> Publish:
    return Publish(1, 1, number, slot, rows, masked, rejected, 0, lanes, list(moments))
