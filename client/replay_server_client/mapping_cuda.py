"""The mapping of a ring in another process's GPU memory: one cudaIpcOpenMemHandle, one cudaIpcCloseMemHandle, no copy.

Both may happen at any moment, in the background thread too, and other threads of the process may be capturing a CUDA graph then: nothing
here waits for the whole device, which would spoil their capture.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch
from cuda.bindings import runtime as cudart
from replay_server_protocol.errors import AttachRefused, DeviceError, ProtocolViolation
from replay_server_protocol.messages import RingAt
from replay_server_protocol.schema import Schema

from replay_server_client.ring_tensors import NO_RING, RingTensors

_HANDLE_BYTES = 64

_ONE_AT_A_TIME = threading.Lock()
_OPEN_ATTEMPTS = 50
_OPEN_AGAIN_S = 0.01


class CudaMapping:
    """``at``'s allocation opened on ``device``, which must be the GPU it lies on."""

    def __init__(self, at: RingAt, schema: Schema, device: torch.device) -> None:
        if len(at.handle) != _HANDLE_BYTES:
            raise ProtocolViolation(f"a CUDA IPC handle has {_HANDLE_BYTES} bytes, {len(at.handle)} came")
        self._device = device
        handle = cudart.cudaIpcMemHandle_t()
        handle.reserved = at.handle
        with relaxed_capture_mode(), torch.cuda.device(device):
            torch.cuda.init()
            torch.cuda.current_stream(device).synchronize()  # makes the device's context before the first call past torch
            status, self._address = _open(handle)
        if status != cudart.cudaError_t.cudaSuccess:
            cudart.cudaGetLastError()  # else torch's next call would raise it
            raise AttachRefused(
                f"cudaIpcOpenMemHandle on {device}: {status.name}; server and learner need one uid, one GPU (not two MIG slices) and a "
                "driver with CUDA IPC; --storage host works without"
            )
        self._is_open = True
        try:
            self.allocation = torch.as_tensor(_Allocation(int(self._address), at.alloc_bytes), device=device)
            self.tensors = RingTensors.of(self.allocation, at, schema)
        except BaseException:
            self.close()
            raise

    def read_cell(self, offset: int, n_bytes: int) -> bytes:
        with relaxed_capture_mode():
            return self.allocation[offset : offset + n_bytes].cpu().numpy().tobytes()

    def close(self) -> None:
        """Whoever has read the ring must have waited for that: a stream's work on it is no more waited for here."""
        if not self._is_open:
            return
        self._is_open = False
        self.tensors, self.allocation = NO_RING, torch.empty(0, dtype=torch.uint8)
        with relaxed_capture_mode(), torch.cuda.device(self._device), _ONE_AT_A_TIME:
            (status,) = cudart.cudaIpcCloseMemHandle(self._address)
        if status != cudart.cudaError_t.cudaSuccess:
            cudart.cudaGetLastError()
            raise DeviceError(f"cudaIpcCloseMemHandle on {self._device}: {status.name}")


def _open(handle: cudart.cudaIpcMemHandle_t) -> tuple[cudart.cudaError_t, int]:
    """The driver counts how often a process has opened a handle. At a bad moment it says cudaErrorAlreadyMapped instead: seen once on a
    busy H200, as a second learner of a process mapped the ring; UCX opens under a lock for the same reason. Then it is asked again, for up
    to half a second."""
    for attempt in range(_OPEN_ATTEMPTS):
        if attempt:
            time.sleep(_OPEN_AGAIN_S)
        with _ONE_AT_A_TIME:
            status, address = cudart.cudaIpcOpenMemHandle(handle, cudart.cudaIpcMemLazyEnablePeerAccess)
        if status != cudart.cudaError_t.cudaErrorAlreadyMapped:
            break
        cudart.cudaGetLastError()  # else the next attempt, or torch's next call, would raise it
    return status, address


class _Allocation:
    """Memory that torch.as_tensor wraps without a copy: ``uint8[n_bytes]`` at ``address``."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (n_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}


def relax_capture_mode() -> None:
    """Lets the calling thread use CUDA while another thread captures a graph: torch's default mode would let this thread's event
    queries spoil that capture."""
    _exchange_capture_mode(cudart.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)


@contextlib.contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """As ``relax_capture_mode``, for a while."""
    before = _exchange_capture_mode(cudart.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)
    try:
        yield
    finally:
        _exchange_capture_mode(before)


def _exchange_capture_mode(mode: cudart.cudaStreamCaptureMode) -> cudart.cudaStreamCaptureMode:
    status, before = cudart.cudaThreadExchangeStreamCaptureMode(mode)
    if status != cudart.cudaError_t.cudaSuccess:
        raise DeviceError(f"cudaThreadExchangeStreamCaptureMode: {status.name}")
    return before
