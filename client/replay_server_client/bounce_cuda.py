"""Copies out of a ring on a GPU into pinned memory, on a stream of their own."""

from __future__ import annotations

import torch
from torch import Tensor


class CudaBounce:
    """``allocation`` is the mapped ring, ``uint8[alloc_bytes]``. Copies run on the GPU's copy engine: no kernel is launched."""

    def __init__(self, allocation: Tensor, n_bytes: int) -> None:
        self._pinned = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
        self.memory = self._pinned.numpy()
        self._allocation = allocation
        self._stream = torch.cuda.Stream(allocation.device)

    def copy(self, offset: int, n_bytes: int, at: int) -> None:
        with torch.cuda.stream(self._stream):
            self._pinned[at : at + n_bytes].copy_(self._allocation[offset : offset + n_bytes], non_blocking=True)

    def finish(self) -> None:
        self._stream.synchronize()
