"""The high-priority stream on which a learner draws and gathers, and the memory of the CUDA graphs that run on it.

torch keeps device memory for each stream and for each graph pool, and gives that of a dropped pool back only when the device is full: a
process that opens one learner after the other would hold more with each. So a learner leaves its side stream to the next one.
"""

from __future__ import annotations

from typing import Any

import torch

_idle: list[SideStream] = []


class SideStream:
    """A stream and its graph pool: what runs on one stream runs one after the other, so that its graphs may share scratch memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.graph_pool: Any = torch.cuda.graph_pool_handle()  # torch's type for it is private
        self.last_graph: torch.cuda.CUDAGraph | None = None
        """Never replayed again: a pool ends with its last graph, and is of no use after that."""


class SideStreams:
    """Those of one learner: on each device the same one for life."""

    def __init__(self) -> None:
        self._lent: dict[torch.device, SideStream] = {}

    def on(self, device: torch.device) -> SideStream:
        if device not in self._lent:
            self._lent[device] = _left_by_another_learner(device) or SideStream(device)
        return self._lent[device]

    def give_back(self) -> None:
        """Once every piece of work on them was seen complete, and no graph of theirs will be replayed."""
        while self._lent:
            _idle.append(self._lent.popitem()[1])


def _left_by_another_learner(device: torch.device) -> SideStream | None:
    for side in [side for side in _idle if side.device == device]:
        try:
            _idle.remove(side)
        except ValueError:  # taken by another thread
            continue
        return side
    return None
