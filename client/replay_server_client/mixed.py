"""One batch from several requests or servers, in shares that may change at every call: offline data beside what comes in now, say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from replay_server_protocol.errors import InvalidRequest, SchemaMismatch
from torch import Tensor

from replay_server_client.batch import Batch
from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.deadline import Deadline

if TYPE_CHECKING:
    from replay_server_client.sampler import Sampler

_BUFFERS = 2


class MixedBatch(Batch):
    """Rows of several batches, one part after the other, in memory of its own. ``parts`` says which rows came from which batch.

    ``window`` and ``number`` are those of the first part; each part's batch has its own.
    """

    __slots__ = ("parts",)

    def __init__(self, memory: BatchBuffer, parts: Sequence[tuple[Batch, slice]]) -> None:
        first = parts[0][0]
        super().__init__(memory, first.number, first.window)
        self.parts = tuple(parts)


class MixedSampler:
    """``MixedSampler([(a, 0.5), (b, 0.5)])``: batches whose rows come from samplers of one kind (``Learner.sampler``) in these shares.

    Each sampler is made with the ``n`` of the whole batch: of what it draws the first rows are taken, as many as its share says, and only
    those count as sampled. Shares that are no whole rows are made up for over the calls. For the thread that uses the learners.
    """

    def __init__(self, parts: Sequence[tuple[Sampler, float]]) -> None:
        """Raises InvalidRequest for samplers of different requests, and for shares that are not 0 or above with a sum above 0."""
        self._samplers = [sampler for sampler, _ in parts]
        self._shares = self._check_shares([share for _, share in parts])
        requests = {(r.n, r.n_step, r.gamma, r.length, r.burn_in) for r in (sampler.request for sampler in self._samplers)}
        if len(requests) != 1 or len(self._samplers) < 2 or len(set(map(id, self._samplers))) != len(self._samplers):
            raise InvalidRequest("a mixed batch is made from two or more samplers with one n, n_step, gamma, length and burn_in")
        self._n = self._samplers[0].request.n
        self._owed = [0.0] * len(self._samplers)
        self._memories: list[BatchBuffer] = []
        self._turn = 0
        self._last: MixedBatch | None = None

    def sample(self, *, shares: Sequence[float] | None = None, timeout: float | None = 5.0) -> MixedBatch:
        """The next batch. ``shares`` hold from this call on; they need not sum up to 1. Of a sampler whose share is 0 nothing is asked.

        Ends the batch before; its tensors' memory is written again by the call after this one, on the current stream. Raises what
        ``Sampler.sample`` raises, within one ``timeout`` for all; SchemaMismatch where the servers' rows differ.
        """
        if shares is not None:
            self._shares = self._check_shares(shares)
        if self._last is not None:
            self._last.expire()
        deadline = Deadline(timeout)
        counts = self._rows_of_parts()
        taken = []
        for sampler, count in zip(self._samplers, counts, strict=True):
            sampler.counted_rows = max(1, count * (sampler.request.rows // self._n))
            if count:
                left_s = None if timeout is None else deadline.remaining_s
                taken.append((sampler.sample(timeout=left_s), count))
        self._owed = [owed + self._n * share - count for owed, share, count in zip(self._owed, self._shares, counts, strict=True)]
        self._last = self._join(taken)
        return self._last

    def update_priorities(self, batch: MixedBatch, priorities: Tensor | Sequence[float]) -> None:
        """As ``Learner.update_priorities``, for the parts that were drawn by priority; ``[n]`` values in the order of the batch."""
        batch.memory()
        given = torch.as_tensor(priorities)
        if given.numel() != self._n:
            raise InvalidRequest(f"priorities {list(given.shape)}: one for each of {self._n:,} draws is right")
        for part, rows in batch.parts:
            if part.memory().request.is_by_priority:
                part.memory().write_back.write_priorities(given.reshape(-1)[rows])

    def _join(self, taken: Sequence[tuple[Batch, int]]) -> MixedBatch:
        """Copies the rows together, on the current stream."""
        memory = self._memory_like(taken[0][0].memory())
        self._turn = (self._turn + 1) % _BUFFERS
        parts, start, rows_each = [], 0, memory.request.rows // self._n
        for batch, count in taken:
            source, end = batch.memory(), start + count
            if source.schema != memory.schema or source.rows.device != memory.rows.device:
                raise SchemaMismatch(
                    f"a mixed batch has rows of one schema on one device: {memory.schema.differences(source.schema) or source.rows.device}"
                )
            memory.rows[start * rows_each : end * rows_each].copy_(source.rows[: count * rows_each])
            for name, result in memory.results.items():
                result[start:end].copy_(source.results[name][:count])
            parts.append((batch, slice(start, end)))
            start = end
        return MixedBatch(memory, parts)

    def _memory_like(self, source: BatchBuffer) -> BatchBuffer:
        if not self._memories or self._memories[0].schema != source.schema:
            device = torch.device(source.rows.device)
            self._memories = [BatchBuffer(number, source.schema, source.request, device) for number in range(_BUFFERS)]
        return self._memories[self._turn]

    def _rows_of_parts(self) -> list[int]:
        """Whole rows that sum up to n; what is missing goes to the parts that are owed most."""
        due = [owed + self._n * share for owed, share in zip(self._owed, self._shares, strict=True)]
        counts = [max(0, math.floor(rows)) if share else 0 for rows, share in zip(due, self._shares, strict=True)]
        order = sorted(range(len(due)), key=lambda part: counts[part] - due[part])
        order = [part for part in order if self._shares[part]]
        missing = self._n - sum(counts)
        for turn in range(missing):
            counts[order[turn % len(order)]] += 1
        for _ in range(-missing):
            counts[max(filter(counts.__getitem__, order), key=lambda part: counts[part] - due[part])] -= 1
        return counts

    def _check_shares(self, shares: Sequence[float]) -> list[float]:
        if len(shares) != len(self._samplers) or not all(math.isfinite(share) and share >= 0 for share in shares) or not sum(shares) > 0:
            raise InvalidRequest(f"shares={list(shares)!r}: {len(self._samplers)} numbers of at least 0, not all 0")
        return [share / sum(shares) for share in shares]
