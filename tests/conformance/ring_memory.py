"""What every RingMemory promises, whatever it is made of: subclass RingMemoryPromises, give it a ``bench`` fixture, and it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from replay_server_protocol.errors import DeviceError
from replay_server_protocol.segment import Segment, segment_name

from replay_server.storage import Copy, RingLayout, RingMemory, Write

RING_ROWS, STRIDE = 64, 48
LAYOUT = RingLayout.of(RING_ROWS, STRIDE, has_link=True, has_priority=True)
RING_BYTES = RING_ROWS * STRIDE


@dataclass(frozen=True)
class Bench:
    """``make(copy_delay_s)`` gives a ring of LAYOUT that lives as long as the test; ``read`` its bytes as they are now."""

    make: Callable[[float], RingMemory]
    read: Callable[[RingMemory, int, int], bytes]


def wait_completed(ring: RingMemory, tickets: int, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while ring.completed() < tickets:
        assert time.monotonic() < end, f"{ring.completed()} of {tickets} tickets complete after {timeout_s} s"


def fill(segment: Segment, seed: int = 1) -> bytes:
    segment.bytes[:] = np.random.default_rng(seed).integers(0, 256, segment.n_bytes, np.uint8)
    return bytes(segment.bytes)


class RingMemoryPromises:
    """The suite. ``source`` is a registered-by-the-test segment of 64 KiB."""

    @pytest.fixture
    def source(self) -> Iterator[Segment]:
        segment = Segment.create(segment_name(f"test{time.monotonic_ns()}", "slot"), 1 << 16)
        segment.unlink()
        yield segment
        segment.close()

    def test_columns_and_proof_cells_start_as_zeros(self, bench: Bench) -> None:
        ring = bench.make(0)
        assert bench.read(ring, RING_BYTES, LAYOUT.alloc_bytes - RING_BYTES) == bytes(LAYOUT.alloc_bytes - RING_BYTES)

    def test_place_covers_the_layout_and_the_bytes_are_accounted(self, bench: Bench) -> None:
        ring = bench.make(0)
        assert ring.place.alloc_bytes >= LAYOUT.alloc_bytes
        assert ring.place.alloc_bytes in (ring.device_bytes, ring.host_bytes)
        assert 0 < len(ring.place.handle) <= 128

    def test_bytes_land_where_told_and_nowhere_else(self, bench: Bench, source: Segment) -> None:
        ring, content = bench.make(0), fill(source)
        ring.register(source)
        ring.submit([Copy(0, source.address, RING_BYTES)])
        ring.submit([Copy(5 * STRIDE, source.address + 4096, 3 * STRIDE)])
        wait_completed(ring, 2)
        expected = bytearray(content[:RING_BYTES])
        expected[5 * STRIDE : 8 * STRIDE] = content[4096 : 4096 + 3 * STRIDE]
        assert bench.read(ring, 0, RING_BYTES) == bytes(expected)
        ring.unregister(source)

    def test_a_span_split_at_the_wrap_is_one_ticket(self, bench: Bench, source: Segment) -> None:
        ring, content = bench.make(0), fill(source)
        ring.register(source)
        first, second = 2 * STRIDE, 3 * STRIDE
        ring.submit([Copy(RING_BYTES - first, source.address, first), Copy(0, source.address + first, second)])
        wait_completed(ring, 1)
        assert ring.completed() == 1
        assert bench.read(ring, RING_BYTES - first, first) == content[:first]
        assert bench.read(ring, 0, second) == content[first : first + second]
        ring.unregister(source)

    def test_writes_come_after_the_copies_of_their_ticket_and_in_order(self, bench: Bench, source: Segment) -> None:
        ring, content = bench.make(0), fill(source)
        ring.register(source)
        ring.submit([Copy(0, source.address, 64)], [Write(8, b"A" * 16), Write(16, b"B" * 16)])
        wait_completed(ring, 1)
        assert bench.read(ring, 0, 64) == content[:8] + b"A" * 8 + b"B" * 16 + content[32:64]
        ring.unregister(source)

    def test_a_ticket_may_be_writes_alone(self, bench: Bench) -> None:
        ring = bench.make(0)
        ring.submit([], [Write(LAYOUT.proof_cell(3), b"p" * 64)])
        wait_completed(ring, 1)
        assert bench.read(ring, LAYOUT.proof_cell(3), 64) == b"p" * 64

    def test_later_tickets_overwrite_earlier_ones(self, bench: Bench, source: Segment) -> None:
        ring, content = bench.make(0), fill(source)
        ring.register(source)
        for index in range(50):
            ring.submit([Copy(0, source.address + index * STRIDE, STRIDE)], [Write(STRIDE, index.to_bytes(8, "little"))])
        wait_completed(ring, 50)
        assert bench.read(ring, 0, STRIDE) == content[49 * STRIDE : 50 * STRIDE]
        assert bench.read(ring, STRIDE, 8) == (49).to_bytes(8, "little")
        ring.unregister(source)

    def test_a_delayed_ticket_is_torn_until_it_is_complete(self, bench: Bench, source: Segment) -> None:
        delay_s = 0.2
        ring, content = bench.make(delay_s), fill(source)
        ring.register(source)
        before, submitted_s = bench.read(ring, 0, RING_BYTES), time.monotonic()
        ring.submit([Copy(0, source.address, RING_BYTES)], [Write(RING_BYTES, b"done")])
        while ring.completed() == 0:
            assert time.monotonic() < submitted_s + 10
            seen = bench.read(ring, RING_BYTES // 2, RING_BYTES)
            if time.monotonic() < submitted_s + delay_s:
                assert seen[: RING_BYTES // 2] == before[RING_BYTES // 2 :]
                assert seen[RING_BYTES // 2 :][:4] == bytes(4)
        assert time.monotonic() >= submitted_s + delay_s
        assert bench.read(ring, 0, RING_BYTES) == content[:RING_BYTES]
        assert bench.read(ring, RING_BYTES, 4) == b"done"
        ring.unregister(source)

    def test_submit_does_not_wait_for_a_delayed_ticket(self, bench: Bench, source: Segment) -> None:
        ring = bench.make(0.2)
        ring.register(source)
        ring.submit([Copy(0, source.address, STRIDE)])
        wait_completed(ring, 1)  # the first one of a process loads what the device needs
        start_s = time.monotonic()
        for index in range(3):
            ring.submit([Copy(index * STRIDE, source.address, STRIDE)])
        assert time.monotonic() - start_s < 0.2
        wait_completed(ring, 4)
        ring.unregister(source)

    def test_completed_counts_every_ticket_once_and_never_falls(self, bench: Bench, source: Segment) -> None:
        ring = bench.make(0)
        ring.register(source)
        assert ring.completed() == 0
        seen = 0
        for ticket in range(1, 4001):
            ring.submit([Copy(ticket % RING_ROWS * STRIDE, source.address, STRIDE)], [Write(RING_BYTES, bytes(16))])
            if ticket % 100 == 0:
                now = ring.completed()
                assert seen <= now <= ticket
                seen = now
        wait_completed(ring, 4000)
        assert ring.completed() == 4000
        ring.unregister(source)

    def test_more_tickets_and_writes_than_can_be_in_flight_all_arrive_in_order(self, bench: Bench, source: Segment) -> None:
        ring, content = bench.make(0), fill(source)
        ring.register(source)
        for index in range(3000):
            ring.submit([Copy(0, source.address + index % 1000, STRIDE)], [Write(STRIDE, index.to_bytes(4, "little") * 512)])
        wait_completed(ring, 3000)
        assert bench.read(ring, STRIDE, 2048) == (2999).to_bytes(4, "little") * 512
        assert bench.read(ring, 0, STRIDE) == content[999 : 999 + STRIDE]
        ring.unregister(source)

    @pytest.mark.parametrize("offset", [-1, LAYOUT.alloc_bytes + (2 << 20)])
    def test_bytes_outside_the_allocation_are_refused_and_nothing_is_counted(self, bench: Bench, source: Segment, offset: int) -> None:
        ring = bench.make(0)
        with pytest.raises(DeviceError, match="outside"):
            ring.submit([Copy(offset, source.address, 16)])
        with pytest.raises(DeviceError, match="outside"):
            ring.submit([], [Write(offset, b"0123")])
        assert ring.completed() == 0

    def test_register_says_how_it_copies_and_can_be_undone_and_done_again(self, bench: Bench, source: Segment) -> None:
        ring = bench.make(0)
        for round_number in (1, 2):
            assert ring.register(source) in ("memory", "pinned")
            ring.submit([Copy(0, source.address, 16)])
            wait_completed(ring, round_number)
            ring.unregister(source)

    def test_a_segment_that_was_never_registered_still_arrives(self, bench: Bench, source: Segment) -> None:
        ring, content = bench.make(0), fill(source)
        ring.submit([Copy(0, source.address, 1024)])
        wait_completed(ring, 1)
        assert bench.read(ring, 0, 1024) == content[:1024]

    def test_a_closed_ring_refuses_tickets_and_closes_again_in_peace(self, bench: Bench, source: Segment) -> None:
        ring = bench.make(0)
        ring.submit([Copy(0, source.address, 16)])
        wait_completed(ring, 1)
        ring.close()
        ring.close()
        with pytest.raises(DeviceError, match="closed"):
            ring.submit([Copy(0, source.address, 16)])
