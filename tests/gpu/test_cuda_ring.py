"""The ring on the GPU: the promises of every ring, and its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from conformance.ring_memory import LAYOUT, RING_BYTES, Bench, RingMemoryPromises, fill, wait_completed
from replay_server_protocol.errors import BudgetExceeded, DeviceError
from replay_server_protocol.segment import Segment, segment_name

from replay_server.cuda_ring import ALLOCATION_BYTES, MAX_TICKETS, STAGING_BYTES, CudaRing
from replay_server.cuda_runtime import CudaRuntime, probe_devices
from replay_server.storage import Copy, RingLayout, RingMemory, Write

pytestmark = pytest.mark.gpu

_OPEN_AND_READ = """
import ctypes, sys
from cuda.bindings import runtime as cuda
handle = cuda.cudaIpcMemHandle_t()
ctypes.memmove(handle.getPtr(), bytes.fromhex(sys.argv[1]), 64)
code, address = cuda.cudaIpcOpenMemHandle(handle, cuda.cudaIpcMemLazyEnablePeerAccess)
assert code == 0, code
content = ctypes.create_string_buffer(64)
(code,) = cuda.cudaMemcpy(ctypes.addressof(content), int(address), 64, cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost)
assert code == 0, code
assert cuda.cudaIpcCloseMemHandle(address)[0] == 0
print(content.raw.hex())
"""


@pytest.fixture(scope="module")
def runtime() -> CudaRuntime:
    return CudaRuntime.load()


@pytest.fixture
def bench(runtime: CudaRuntime) -> Iterator[Bench]:
    rings: list[CudaRing] = []

    def make(copy_delay_s: float) -> RingMemory:
        rings.append(CudaRing.create(0, LAYOUT, runtime=runtime, copy_delay_s=copy_delay_s))
        return rings[-1]

    def read(ring: RingMemory, offset: int, n_bytes: int) -> bytes:
        assert isinstance(ring, CudaRing)
        return runtime.read(ring.address + offset, n_bytes)

    yield Bench(make, read)
    for ring in rings:
        ring.discard()


@pytest.fixture
def source() -> Iterator[Segment]:
    segment = Segment.create(segment_name(f"test{time.monotonic_ns()}", "slot"), 1 << 20)
    segment.unlink()
    yield segment
    segment.close()


class TestCudaRing(RingMemoryPromises):
    pass


def test_a_probed_device_is_the_one_torch_sees(runtime: CudaRuntime) -> None:
    torch = pytest.importorskip("torch")
    (device,) = probe_devices(0)
    assert device.uuid == str(torch.cuda.get_device_properties(0).uuid)
    assert device.name == torch.cuda.get_device_name(0)
    assert 0 < device.free_bytes <= device.total_bytes


def test_a_device_that_is_not_there_is_refused_with_those_that_are(runtime: CudaRuntime) -> None:
    with pytest.raises(DeviceError, match="cuda:99 was asked for"):
        probe_devices(99)


def test_a_ring_larger_than_the_gpu_is_refused_with_both_numbers_and_leaves_no_error(bench: Bench, runtime: CudaRuntime) -> None:
    with pytest.raises(BudgetExceeded) as refused:
        CudaRing.create(0, RingLayout.of(1 << 32, 1024, has_link=False, has_priority=False), runtime=runtime)
    assert refused.value.details["needed_bytes"] > refused.value.details["free_bytes"] > 0  # type: ignore[operator]
    bench.make(0)


def test_a_ring_whose_rows_read_back_wrong_is_refused_and_gives_its_memory_back(
    runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    CudaRing.create(0, LAYOUT, runtime=runtime).discard()  # what the driver keeps is made
    free_bytes = runtime.device(0).free_bytes
    monkeypatch.setattr(runtime, "read", lambda address, n_bytes: bytes(n_bytes))
    with pytest.raises(DeviceError, match="reads back other bytes"):
        CudaRing.create(0, LAYOUT, runtime=runtime)
    assert runtime.device(0).free_bytes == free_bytes


def test_the_allocation_is_whole_blocks_and_its_handle_opens_in_another_process(bench: Bench) -> None:
    ring = bench.make(0)
    assert ring.device_bytes % ALLOCATION_BYTES == 0
    ring.submit([], [Write(0, bytes(range(64)))])
    wait_completed(ring, 1)
    command = [sys.executable, "-c", _OPEN_AND_READ, ring.place.handle.hex()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    assert bytes.fromhex(found.stdout) == bytes(range(64))


def test_a_second_registration_falls_back_and_leaves_no_error_behind(bench: Bench, source: Segment) -> None:
    one, other = bench.make(0), bench.make(0)
    assert one.register(source) == "pinned"
    assert other.register(source).startswith("pageable: cudaHostRegister answered")
    other.submit([Copy(0, source.address, 1024)])
    wait_completed(other, 1)
    other.unregister(source)
    assert one.register(source).startswith("pageable")
    one.unregister(source)


def test_tickets_beyond_the_events_wait_in_line_and_none_is_lost(bench: Bench, source: Segment) -> None:
    ring, content = bench.make(0.0005), fill(source)
    ring.register(source)
    tickets = MAX_TICKETS + 100
    for index in range(tickets):
        ring.submit([Copy(0, source.address + index, 48)])
    assert ring.completed() < tickets
    wait_completed(ring, tickets)
    assert bench.read(ring, 0, 48) == content[tickets - 1 : tickets + 47]
    ring.unregister(source)


def test_writes_beyond_the_staging_memory_wait_in_line_and_arrive(bench: Bench) -> None:
    ring, piece = bench.make(0.001), RING_BYTES
    tickets = 2 * STAGING_BYTES // piece
    for index in range(tickets):
        ring.submit([], [Write(0, bytes([index % 251]) * piece)])
    wait_completed(ring, tickets, timeout_s=60)
    assert bench.read(ring, 0, piece) == bytes([(tickets - 1) % 251]) * piece


def test_nothing_is_allocated_on_the_device_while_serving(bench: Bench, source: Segment, runtime: CudaRuntime) -> None:
    ring = bench.make(0)
    ring.register(source)
    ring.submit([Copy(0, source.address, 48)], [Write(48, bytes(48))])
    wait_completed(ring, 1)
    free_bytes = runtime.device(0).free_bytes
    for ticket in range(2, 5002):
        ring.submit([Copy(0, source.address, 48)], [Write(48, bytes(48))])
        if ticket % 64 == 0:
            ring.completed()
    wait_completed(ring, 5001)
    assert runtime.device(0).free_bytes == free_bytes
    ring.unregister(source)


def test_one_copy_and_its_event_are_submitted_in_less_than_ten_microseconds(bench: Bench, source: Segment) -> None:
    ring = bench.make(0)
    ring.register(source)
    spent_ns = []
    for ticket in range(1, 2001):
        copies = [Copy(0, source.address, 48)]
        start_ns = time.perf_counter_ns()
        ring.submit(copies)
        spent_ns.append(time.perf_counter_ns() - start_ns)
        if ticket % 32 == 0:
            wait_completed(ring, ticket)
    wait_completed(ring, 2000)
    assert sorted(spent_ns)[1000] < 10_000
    ring.unregister(source)
