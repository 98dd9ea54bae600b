"""Small pieces of pinned host memory for what CUDA graphs copy in and out. None is used twice: a graph may write its piece for ever.

torch's own pinned memory is no choice here. When a piece of it is dropped, torch records an event on every stream that has used it; if such
a stream is under capture just then, by another learner in another thread or with the garbage collector running in the midst, the event
belongs to that graph, and asking for it fails every later allocation of pinned memory in the process
(https://github.com/pytorch/pytorch/issues/193982 is the same of device memory).
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import torch
from replay_server_protocol.errors import DeviceError
from torch import Tensor

_PAGE_WORDS = 512
_WORD_BYTES = 8


class _Pages:
    """Pinned pages, cut into pieces from their beginning."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._address = self._left = 0

    def cut(self, n: int) -> int:
        with self._lock:
            if n > self._left:
                self._address, self._left = _pin(max(n, _PAGE_WORDS)), max(n, _PAGE_WORDS)
            address = self._address
            self._address, self._left = address + _WORD_BYTES * n, self._left - n
            return address


_pages = _Pages()


def pinned_words(n: int) -> Tensor:
    """Zeros, ``int64[n]`` in pinned memory, which stays the process's own until it ends: a batch buffer takes about a hundred bytes.

    Raises DeviceError when no memory can be pinned. Where cuda-bindings are missing it is torch's pinned memory, which is as good: only a
    ring on the GPU has graphs, and needs them.
    """
    try:
        address = _pages.cut(n)
    except ImportError:
        return torch.zeros(n, dtype=torch.int64, pin_memory=True)
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_int64 * n).from_address(address)))


def _pin(n: int) -> int:
    from cuda.bindings import runtime as cudart

    from replay_server_client.mapping_cuda import relaxed_capture_mode

    with relaxed_capture_mode():
        status, address = cudart.cudaHostAlloc(_WORD_BYTES * n, cudart.cudaHostAllocDefault)
    if status != cudart.cudaError_t.cudaSuccess:
        cudart.cudaGetLastError()  # else torch's next call would raise it
        raise DeviceError(f"cudaHostAlloc of {_WORD_BYTES * n} bytes: {status.name}; see ulimit -l and the host's free memory")
    ctypes.memset(address, 0, _WORD_BYTES * n)
    return int(address)
