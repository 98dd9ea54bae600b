"""The learner's mapping of the ring: made once for each generation, proved, closed once.

The rows are seen as ``uint8[ring_rows, stride]``. What the server kept in host memory (storage cpu or host) is a shared segment; a
CUDA ring is opened by its IPC handle (mapping_cuda, imported only then).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

import torch
from replay_server_protocol.errors import AttachRefused, InvalidRequest, ProtocolViolation, SchemaMismatch, shown
from replay_server_protocol.messages import RingAt, Transport
from replay_server_protocol.schema import Schema
from replay_server_protocol.segment import Segment

from replay_server_client.ring_tensors import NO_RING, RingTensors

PROOF_BYTES = 64
_ONE_THREAD_DEVICES = {"mps"}
"""Where device work may come from one thread only: such a learner has no background thread, its own calls drive it."""


class RingMapping(Protocol):
    """``tensors`` are views of it, until ``close``."""

    tensors: RingTensors
    allocation: torch.Tensor  # uint8[alloc_bytes]

    def read_cell(self, offset: int, n_bytes: int) -> bytes:
        """Bytes of the allocation, read through the mapping. Waits for the device."""

    def close(self) -> None:
        """Unmaps, after every piece of work that reads the ring was seen complete. Safe to call twice."""


class HostMapping:
    """A ring in a shared segment."""

    def __init__(self, at: RingAt, schema: Schema) -> None:
        self._segment = Segment.open(_segment_name(at), at.alloc_bytes)
        self.allocation = torch.from_numpy(self._segment.bytes)
        self.tensors = RingTensors.of(self.allocation, at, schema)

    def read_cell(self, offset: int, n_bytes: int) -> bytes:
        return self._segment.bytes[offset : offset + n_bytes].tobytes()

    def close(self) -> None:
        self.tensors, self.allocation = NO_RING, NO_RING.rows
        self._segment.close()


@dataclass(frozen=True, slots=True)
class Ring:
    """One generation's ring as this learner uses it. Batches lie on ``device``."""

    at: RingAt
    schema: Schema
    mapping: RingMapping
    device: torch.device

    @property
    def transport(self) -> Transport:
        if self.at.storage == "cuda":
            return "cuda_ipc"
        return "shared_memory" if self.device.type == "cpu" else "staged"

    @property
    def is_staged(self) -> bool:
        """Whether batches go from a host ring to the GPU through pinned memory."""
        return self.at.storage != "cuda" and self.device.type == "cuda"

    @property
    def is_for_one_thread(self) -> bool:
        return is_for_one_thread(self.device.type)


def is_for_one_thread(device: str) -> bool:
    """Whether all device work must come from the learner's own thread."""
    return device in _ONE_THREAD_DEVICES


def check_device(device: str) -> str:
    """Returns ``device`` if it is one of auto, cpu, cuda, cuda:N, mps and is there; raises InvalidRequest otherwise."""
    if not isinstance(device, str):
        raise InvalidRequest(f"device={shown(device)}: one of 'auto', 'cpu', 'cuda', 'cuda:N', 'mps'")
    kind, colon, index = device.partition(":")
    if device not in ("auto", "cpu", "cuda", "mps") and not (kind == "cuda" and colon and index.isdecimal()):
        raise InvalidRequest(f"device={shown(device)}: one of 'auto', 'cpu', 'cuda', 'cuda:N', 'mps'")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise InvalidRequest(f"device={shown(device)}: this torch sees no MPS device; use device='cpu'")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise InvalidRequest(f"device={shown(device)}: this torch sees no CUDA device; use device='cpu' or a torch built for CUDA")
        if index and int(index) >= torch.cuda.device_count():
            raise InvalidRequest(f"device={shown(device)}: there are {torch.cuda.device_count()} CUDA devices here")
    return device


def device_uuid(device: str) -> str | None:
    """UUID of the GPU that ``device`` names, None where it leaves the choice to the ring's place."""
    return str(torch.cuda.get_device_properties(int(device.partition(":")[2])).uuid) if ":" in device else None


def map_ring(at: RingAt, device: str, server_pid: int, expected: Schema | None, *, require_zero_copy: bool = False) -> Ring:
    """Maps the ring for a learner that asked for ``device``.

    Raises AttachRefused when the device can't reach the ring, or with ``require_zero_copy`` only by way of host memory, SchemaMismatch
    when its rows aren't the expected ones, ProtocolViolation when the segment is missing or the sizes contradict each other.
    """
    schema = Schema.from_wire(at.schema)
    if expected is not None and (differences := expected.differences(schema)):
        raise SchemaMismatch(f"the server's ring has another schema than the learner expects: {differences}")
    if at.ring_rows * schema.stride > at.proof_offset or at.proof_offset + PROOF_BYTES > at.alloc_bytes or not at.ring_rows:
        raise ProtocolViolation(f"a ring of {at.ring_rows:,} rows of {schema.stride} bytes does not fit in {at.alloc_bytes:,} bytes")
    chosen = _place(at, device)
    if chosen.type == "mps" and (doubles := [field.name for field in schema if field.dtype == "float64"]):
        raise AttachRefused(f"MPS has no float64, the dtype of {', '.join(doubles)}: make that float32, or connect with device='cpu'")
    if require_zero_copy and at.storage != "cuda" and chosen.type != "cpu":
        raise AttachRefused(
            f"require_zero_copy: the ring is in host memory (--storage {at.storage}), so every batch would be gathered there and copied to "
            f"{chosen}; serve with --device cuda, connect with device='cpu', or do without require_zero_copy"
        )
    mapping = _map_cuda(at, schema, chosen, server_pid) if at.storage == "cuda" else HostMapping(at, schema)
    return Ring(at, schema, mapping, chosen)


def _place(at: RingAt, device: str) -> torch.device:
    if at.storage == "cuda":
        return _place_cuda(at, device)
    if device == "auto":
        device = "cuda" if at.storage == "host" and torch.cuda.is_available() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def _place_cuda(at: RingAt, device: str) -> torch.device:
    if device in ("cpu", "mps"):
        raise AttachRefused("the ring is in the memory of a GPU: connect with device='cuda', or serve with --storage host for CPU learners")
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if at.device_uuid not in uuids:
        raise AttachRefused(
            f"the ring is on GPU {at.device_uuid}, this process sees {', '.join(uuids) or 'no GPU'}; "
            "make that GPU visible here (CUDA_VISIBLE_DEVICES) or serve with --storage host"
        )
    chosen = torch.device("cuda", uuids.index(at.device_uuid))
    if ":" in device and torch.device(device) != chosen:
        raise AttachRefused(
            f"the ring is on {chosen} (GPU {at.device_uuid}), device={shown(device)} was asked for; connect with device='cuda'"
        )
    return chosen


def _map_cuda(at: RingAt, schema: Schema, device: torch.device, server_pid: int) -> RingMapping:
    if server_pid == os.getpid():  # the driver takes equal pids for one process and refuses to open its own handle (error 201)
        raise AttachRefused(
            f"server and learner both have pid {server_pid}, each in its own PID namespace: CUDA can't tell them apart; "
            "start the containers with one PID namespace (docker: --pid=container:NAME)"
        )
    try:
        from replay_server_client.mapping_cuda import CudaMapping
    except ImportError as error:
        raise AttachRefused(f"mapping a CUDA ring needs cuda-bindings ({error}); install replay-server[cuda]") from error
    return CudaMapping(at, schema, device)


def _segment_name(at: RingAt) -> str:
    try:
        return at.handle.decode("ascii")
    except UnicodeDecodeError as error:
        raise ProtocolViolation("the ring's segment name is not ASCII") from error
