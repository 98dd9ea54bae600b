"""A GPU of host memory whose copies end when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from replay_server_client.rows import Array
from replay_server_protocol.errors import DeviceError
from torch import Tensor

Copies = Sequence[tuple[Tensor, Tensor]]


class FakeDevice:
    """Copies are done at once, or on ``complete`` while ``holds_copies``. Until then their targets are as they were."""

    def __init__(self) -> None:
        self.name = torch.device("cpu")
        self.holds_copies = False
        self.has_failed = False
        self.pinned: list[int] = []
        self._queued: deque[Copies] = deque()
        self._begun = self._done = 0

    @property
    def in_flight(self) -> int:
        return len(self._queued)

    def upload(self, array: Array) -> Tensor:
        return torch.from_numpy(array.copy())

    def allocate(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    def allocate_pinned(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.bool)

    def pin(self, memory: Tensor) -> None:
        self.pinned.append(memory.data_ptr())

    def unpin(self, memory: Tensor) -> None:
        assert not self._queued, "memory was let go with copies into it in flight"
        self.pinned.remove(memory.data_ptr())

    def follow(self) -> None:
        pass

    def copy(self, copies: Copies) -> Callable[[], bool]:
        self._queued.append(copies)
        self._begun += 1
        number = self._begun
        if not self.holds_copies:
            self.complete()
        return lambda: self._is_done(number)

    def complete(self, n: int | None = None) -> None:
        """Ends the ``n`` oldest copies, or all."""
        for _ in range(len(self._queued) if n is None else n):
            for to, source in self._queued.popleft():
                to.copy_(source)
            self._done += 1

    def synchronize(self) -> None:
        self.complete()

    def _is_done(self, number: int) -> bool:
        if self.has_failed:
            raise DeviceError("unspecified launch failure")
        return self._done >= number
