"""The high-priority stream on which a learner draws and gathers, and the memory of the CUDA graphs that run on it.

torch keeps device memory for each stream and for each graph pool, and gives that of a dropped pool back only when the device is full: a
process that opens one learner after the other would hold more with each. So a learner leaves its side stream to the next one.
"""

from __future__ import annotations

from typing import Any

import torch

_idle: list[SideStream] = []


class SideStream:
    """A stream and its graph pool: what runs on one stream runs one after the other, so that its graphs may share scratch memory.

    Where graphs are captured, no memory that torch has pinned may ever have been used: see pinned.py.
    """

    def __init__(self, device: torch.device, *, captures: bool) -> None:
        self.device = device
        self.captures = captures
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.graph_pool: Any = torch.cuda.graph_pool_handle()  # torch's type for it is private
        self.last_graph: torch.cuda.CUDAGraph | None = None
        """Never replayed again: a pool ends with its last graph, and is of no use after that."""


class SideStreams:
    """Those of one learner: on each device the same one for life, or two where it has had a ring on the GPU and one in host memory."""

    def __init__(self) -> None:
        self._lent: dict[tuple[torch.device, bool], SideStream] = {}

    def on(self, device: torch.device, *, captures: bool) -> SideStream:
        kind = device, captures
        if kind not in self._lent:
            self._lent[kind] = _left_by_another_learner(device, captures=captures) or SideStream(device, captures=captures)
        return self._lent[kind]

    def give_back(self) -> None:
        """Once every piece of work on them was seen complete, and no graph of theirs will be replayed."""
        while self._lent:
            _idle.append(self._lent.popitem()[1])


def _left_by_another_learner(device: torch.device, *, captures: bool) -> SideStream | None:
    """The one left last: whoever takes turns through all that are left grows the memory of each."""
    for side in [side for side in reversed(_idle) if (side.device, side.captures) == (device, captures)]:
        try:
            _idle.remove(side)
        except ValueError:  # taken by another thread
            continue
        return side
    return None
