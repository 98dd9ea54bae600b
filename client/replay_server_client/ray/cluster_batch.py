"""A batch whose rows came from rings on several nodes, and the fixed memory that it is assembled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from replay_server_protocol.errors import SchemaMismatch
from replay_server_protocol.schema import Schema
from torch import Tensor

from replay_server_client.batch import Batch
from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.ray.parcel import Drawn
from replay_server_client.request import Request
from replay_server_client.router import ID_COLUMNS, Counts


class Part(NamedTuple):
    """What came from one shard: its place among the learner's, the slot it was asked under, and its rows."""

    place: int
    slot: int
    drawn: Drawn

    @property
    def draws(self) -> int:
        return len(self.drawn.results["seqs"])


class ClusterBatch(Batch):
    """As any batch, rows of one shard after the other. ``ids`` int64[n, 4] (shard, generation, index, seq; of sequences the first row's);
    ``counts`` are the router's, ``sizes`` the rows each shard had when it drew its part. ``window`` counts those of all: (0, rows)."""

    __slots__ = ("counts", "ids", "parts", "sizes")

    def __init__(self, memory: BatchBuffer, number: int, ids: Tensor, parts: Sequence[Part], counts: Counts, sizes: dict[str, int]) -> None:
        super().__init__(memory, number, (0, sum(sizes.values())))
        self.ids = ids
        self.parts = tuple(parts)
        self.counts = counts
        self.sizes = sizes

    @property
    def epoch(self) -> int:
        """Of the membership it was drawn in."""
        return self.counts.epoch


class Assembly:
    """A batch buffer on the learner's device, written again by the next batch; one in pinned host memory before it where that is a GPU."""

    def __init__(self, request: Request, schema: Schema, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.memory = BatchBuffer(0, schema, request, device)
        self.ids = torch.empty(request.n, len(ID_COLUMNS), dtype=torch.int64, device=device)
        self._wire = schema.to_wire()
        self._host = BatchBuffer(0, schema, request, torch.device("cpu"), pin_memory=True) if is_gpu else self.memory
        self._host_ids = torch.empty_like(self.ids, device="cpu", pin_memory=True) if is_gpu else self.ids
        self._is_copied = torch.cuda.Event() if is_gpu else None

    def fill(self, parts: Sequence[Part]) -> None:
        """Queues the copy to a GPU on the current stream. Raises SchemaMismatch where rows have another schema than the first batch's."""
        if self._is_copied is not None:
            self._is_copied.synchronize()
        host, ids, end = self._host, self._host_ids.numpy(), 0
        rows, rows_each = host.rows.numpy(), host.request.rows // host.request.n
        for part in parts:
            drawn, begin, end = part.drawn, end, end + part.draws
            if drawn.schema != self._wire:
                raise SchemaMismatch(f"shards of one learner have one schema: {host.schema.differences(Schema.from_wire(drawn.schema))}")
            rows[begin * rows_each : end * rows_each] = drawn.rows
            for name, values in drawn.results.items():
                host.results[name].numpy()[begin:end] = values
            ids[begin:end, 0], ids[begin:end, 1] = part.place, drawn.generation
            ids[begin:end, 2], ids[begin:end, 3] = drawn.results["indices"], drawn.results["seqs"]
        if self._is_copied is not None:
            self.memory.block.copy_(host.block, non_blocking=True)
            self.ids.copy_(self._host_ids, non_blocking=True)
            self._is_copied.record()
