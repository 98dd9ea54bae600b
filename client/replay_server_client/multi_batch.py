"""A batch whose rows come from several shards, and which rows those are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replay_server_client.batch import Batch
from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.joint import MixedBatch
from replay_server_client.router import ID_COLUMNS, Counts, importance_weights


class Origin(NamedTuple):
    """The shard of a part, as its place among the learner's shards, and its generation then."""

    shard: int
    generation: int


class MultiBatch(MixedBatch):
    """Rows of the union of several rings, those of one shard after the other; ``parts`` and ``origins`` say which came from where.

    ``counts`` are the router's for this batch: its epoch, and each shard's generation and size in rows when it was drawn from.
    ``weights`` of a draw by priority are over all shards. Mutable fields can't be written back through it.
    """

    __slots__ = ("counts", "origins")

    def __init__(self, memory: BatchBuffer, parts: Sequence[tuple[Batch, slice]], origins: Sequence[Origin], counts: Counts) -> None:
        super().__init__(memory, parts)
        self.origins = tuple(origins)
        self.counts = counts

    @property
    def epoch(self) -> int:
        """Of the membership it was drawn in."""
        return self.counts.epoch

    @property
    def ids(self) -> Tensor:
        """What names each draw's row for good: ``int64[n, 4]`` of shard, generation, index, seq; new memory on the batch's device.

        Of sequences the first row's.
        """
        results = self.memory().results
        ids = results["seqs"].new_empty(len(results["seqs"]), len(ID_COLUMNS))
        for origin, (_, rows) in zip(self.origins, self.parts, strict=True):
            ids[rows, 0], ids[rows, 1] = origin
        ids[:, 2], ids[:, 3] = results["indices"], results["seqs"]
        return ids


def weigh(batch: Batch, least: float, beta: float) -> None:
    """Sets the weights of a union's draw by priority; ``least`` is the smallest mass above 0 in any shard, inf where there is none.

    On the current stream.
    """
    results = batch.memory().results
    if math.isfinite(least):
        results["weights"].copy_(importance_weights(results["masses"], least, beta))
    else:
        results["weights"].fill_(1)  # no row has a priority: the draw was uniform


class MassReader:
    """Brings a window's mass and least mass to the host, waiting for that copy alone, not for what is queued on the caller's stream."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def read(self, batch: Batch) -> tuple[float, float]:
        """Of a batch that was seen complete."""
        sums = batch.memory().results["mass_sums"]
        if not sums.is_cuda:
            mass, least = sums.tolist()
            return mass, least
        stream = self._streams.get(sums.device)
        if stream is None:
            stream = self._streams[sums.device] = torch.cuda.Stream(sums.device, priority=-1)
        with torch.cuda.stream(stream):
            mass, least = sums.tolist()
        return mass, least
