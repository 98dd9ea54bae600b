"""The ring in host memory: the promises of every ring, and its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import pytest
from conformance.ring_memory import LAYOUT, Bench, RingMemoryPromises
from replay_server_protocol.errors import DeviceError
from replay_server_protocol.segment import Segment, segment_dir

from replay_server.cpu_ring import CpuRing
from replay_server.cuda_ring import STAGING_BYTES, _Staging
from replay_server.cuda_runtime import probe_devices
from replay_server.storage import RingLayout, RingMemory, Write, prove_rows


def read(ring: RingMemory, offset: int, n_bytes: int) -> bytes:
    """As a learner does: by another mapping of the name."""
    mapping = Segment.open(ring.place.handle.decode(), ring.place.alloc_bytes)
    content = bytes(mapping.bytes[offset : offset + n_bytes])
    mapping.close()
    return content


@pytest.fixture
def bench() -> Iterator[Bench]:
    rings: list[CpuRing] = []

    def make(copy_delay_s: float) -> RingMemory:
        rings.append(CpuRing.create(f"test{time.monotonic_ns()}", LAYOUT, copy_delay_s=copy_delay_s))
        return rings[-1]

    yield Bench(make, read)
    for ring in rings:
        ring.close()


class TestCpuRing(RingMemoryPromises):
    pass


def test_the_name_stays_until_close_and_a_mapping_outlives_it(bench: Bench) -> None:
    ring = bench.make(0)
    path = segment_dir() / ring.place.handle.decode()
    learner = Segment.open(ring.place.handle.decode(), ring.place.alloc_bytes)
    ring.submit([], [Write(0, b"kept")])
    assert path.exists()
    ring.close()
    assert not path.exists()
    assert bytes(learner.bytes[:4]) == b"kept"
    learner.close()


@pytest.mark.parametrize("ring_rows", [1, 2, 3, 1000])
def test_first_middle_and_last_row_are_proved_and_left_as_zeros(ring_rows: int) -> None:
    layout, written = RingLayout.of(ring_rows, 48, has_link=False, has_priority=False), dict[int, bytes]()
    prove_rows(layout, written.__setitem__, lambda offset, n_bytes: written[offset])
    assert written == {row * 48: bytes(48) for row in {0, ring_rows // 2, ring_rows - 1}}


@pytest.mark.parametrize("kept", [lambda offset: offset & 2**31 - 1, lambda offset: min(offset, 2**31)])
def test_a_device_whose_offsets_have_too_few_bits_is_refused_by_the_row(kept: Callable[[int], int]) -> None:
    layout, memory = RingLayout.of(2**31 // 64 * 2 + 1, 64, has_link=False, has_priority=False), dict[int, bytes]()

    def write(offset: int, content: bytes) -> None:
        memory[kept(offset)] = content

    with pytest.raises(DeviceError, match=r"reads back other bytes than were written.*lower --capacity") as refused:
        prove_rows(layout, write, lambda offset, n_bytes: memory[kept(offset)])
    assert refused.value.details["row"] in (0, layout.ring_rows // 2)


def test_a_ring_that_can_not_be_proved_leaves_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuRing, "_read", lambda ring, offset, n_bytes: bytes(n_bytes))
    run_id = f"test{time.monotonic_ns()}"
    with pytest.raises(DeviceError):
        CpuRing.create(run_id, LAYOUT)
    assert not list(segment_dir().glob(f"*{run_id}*"))


def test_host_storage_is_the_same_ring_under_its_own_name() -> None:
    ring = CpuRing.create(f"test{time.monotonic_ns()}", LAYOUT, storage="host")
    try:
        assert (ring.place.storage, ring.device_bytes, ring.host_bytes) == ("host", 0, LAYOUT.alloc_bytes)
    finally:
        ring.close()


def test_without_the_bindings_a_cuda_device_is_refused_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(DeviceError, match=r"cuda-bindings.*replay-server\[cuda\]"):
        probe_devices()


class TestStaging:
    """The arithmetic of the pinned staging ring, on ordinary memory."""

    @pytest.fixture
    def memory(self) -> Iterator[Segment]:
        segment = Segment.create(f"replay-test{time.monotonic_ns()}-staging", STAGING_BYTES)
        segment.unlink()
        yield segment
        segment.close()

    def test_pieces_in_use_never_overlap_and_come_back_in_order(self, memory: Segment) -> None:
        staging, completed = _Staging(memory.address), 0
        live: dict[int, range] = {}
        sizes = [3 << 20, 1 << 10, 2 << 20, 5 << 20, 7, 8 << 20, 4 << 20]
        for ticket in range(1, 201):
            writes = [Write(0, bytes([ticket % 251]) * (sizes[ticket % len(sizes)] - 1)), Write(0, b"!")]
            while not staging.has_room(writes):
                completed += 1
                staging.reclaim(completed)
                del live[completed]
            first, second = staging.keep(writes, ticket)
            piece = range(first - memory.address, second + 1 - memory.address)
            assert piece.start >= 0
            assert piece.stop <= STAGING_BYTES
            assert all(piece.stop <= other.start or other.stop <= piece.start for other in live.values())
            assert memory.bytes[piece.start] == ticket % 251
            live[ticket] = piece

    def test_a_full_staging_ring_has_no_room_until_a_ticket_is_complete(self, memory: Segment) -> None:
        staging, whole = _Staging(memory.address), [Write(0, bytes(STAGING_BYTES))]
        assert staging.has_room(whole)
        staging.keep(whole, 1)
        assert not staging.has_room([Write(0, b"1")])
        staging.reclaim(1)
        assert staging.has_room(whole)
