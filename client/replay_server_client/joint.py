"""One batch out of several: rows of each copied one part after the other into batch buffers of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from replay_server_protocol.errors import InvalidRequest, SchemaMismatch
from torch import Tensor

from replay_server_client.batch import Batch
from replay_server_client.batch_buffer import BatchBuffer

_BUFFERS = 2
_OF_THE_WINDOW = "mass_sums"
"""The one result that is no row's but its window's."""

Taken = Sequence[tuple[Batch, int]]
"""Batches and how many rows, the first ones, are taken of each."""
Parts = Sequence[tuple[Batch, slice]]
"""Batches and where their rows lie."""


class MixedBatch(Batch):
    """Rows of several batches, one part after the other, in memory of its own. ``parts`` says which rows came from which batch.

    ``window`` and ``number`` are those of the first part; each part's batch has its own.
    """

    __slots__ = ("parts",)

    def __init__(self, memory: BatchBuffer, parts: Parts) -> None:
        first = parts[0][0]
        super().__init__(memory, first.number, first.window)
        self.parts = tuple(parts)

    def write_priorities(self, priorities: Tensor | Sequence[float], parts: Parts | None = None) -> None:
        """Gives the rows of ``parts`` (of all, unless told) theirs of ``priorities``, ``[n]`` in the batch's order, if drawn so."""
        n = self.memory().request.n
        given = torch.as_tensor(priorities)
        if given.numel() != n:
            raise InvalidRequest(f"priorities {list(given.shape)}: one for each of {n:,} draws is right")
        for part, rows in self.parts if parts is None else parts:
            if part.memory().request.is_by_priority:
                part.memory().write_back.write_priorities(given.reshape(-1)[rows])


class Joint:
    """Two batch buffers that take turns, on ``device``; without one on that of the parts, which then must be one and the same.

    Copies are queued on the current streams of the devices they are between; torch orders the two.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._memories: list[BatchBuffer] = []
        self._turn = 0

    def join(self, taken: Taken) -> tuple[BatchBuffer, list[tuple[Batch, slice]]]:
        """The batch buffer whose turn it is, filled with the rows taken, and where those of each batch lie."""
        memory = self._memory_like(taken[0][0].memory())
        self._turn = (self._turn + 1) % _BUFFERS
        parts, start, rows_each = [], 0, memory.request.rows // memory.request.n
        for batch, count in taken:
            source, end = batch.memory(), start + count
            if source.schema != memory.schema or (self._device is None and source.rows.device != memory.rows.device):
                raise SchemaMismatch(
                    f"a mixed batch has rows of one schema on one device: {memory.schema.differences(source.schema) or source.rows.device}"
                )
            _copy(source.rows[: count * rows_each], memory.rows[start * rows_each : end * rows_each])
            for name, result in memory.results.items():
                if name != _OF_THE_WINDOW:
                    _copy(source.results[name][:count], result[start:end])
            parts.append((batch, slice(start, end)))
            start = end
        return memory, parts

    def _memory_like(self, source: BatchBuffer) -> BatchBuffer:
        if not self._memories or self._memories[0].schema != source.schema:
            device = self._device or torch.device(source.rows.device)
            self._memories = [BatchBuffer(number, source.schema, source.request, device) for number in range(_BUFFERS)]
        return self._memories[self._turn]


def _copy(source: Tensor, to: Tensor) -> None:
    """From host to host by numpy: torch would start a team of threads for it, which fights the servers for the cores (256 rows of 1,728
    bytes on two busy cores: a batch in 6 ms instead of 0.9 ms)."""
    if source.is_cpu and to.is_cpu:
        to.numpy()[...] = source.numpy()
    else:
        to.copy_(source, non_blocking=to.is_cuda)
