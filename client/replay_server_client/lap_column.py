"""Side columns whose records say which row they belong to, so that one written late is never taken for that of the row's successor.

```
records: int32[ring_rows + 1, words]

ring index 0          |lap|payload …|      lap = 1 + seq // ring_rows of the row that the payload is about, 0: never written
ring index 1          |lap|payload …|
…
spare, at ring_rows   |lap|payload …|      takes what must not be written, since a scatter of fixed shape writes n records; never read
```

With a payload of one word (a priority) a record is one aligned int64, the lap in its low half: written in one store, so never torn.
Of a longer record the payload is written before the lap, and read after it: a reader that finds its row's lap finds no payload of the
row before. Between two writers of one row it can be torn. Every function here queues work and reads no value on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_PRIORITY = 1e18
"""Its square (alpha is at most 2) is far below float32's largest, so that powers of priorities can't overflow."""
STALE, REFUSED = 0, 1
"""Elements of ``counts``: payloads of rows that have left the window; payloads that are no priority."""


@dataclass(frozen=True, slots=True)
class LapColumn:
    """A column's memory: ``laps`` and ``payload`` are strided views of the rows' records, without the spare one."""

    records: Tensor  # int32[ring_rows + 1, words]
    laps: Tensor  # int32[ring_rows]
    payload: Tensor  # int32[ring_rows, words - 1]

    @classmethod
    def of(cls, records: Tensor) -> LapColumn:
        """``records`` as the mapping shows them: contiguous, for two words a record aligned to 8 bytes."""
        return cls(records, records[:-1, 0], records[:-1, 1:])

    @property
    def ring_rows(self) -> int:
        return len(self.laps)

    @property
    def priorities(self) -> Tensor:
        """The payload of a column of priorities, ``float32[ring_rows]``, strided."""
        return self.payload[:, 0].view(torch.float32)


@dataclass(frozen=True, slots=True)
class Update:
    """The fixed memory of one write of ``n`` records; the caller sets ``payload`` and ``is_good``, ``scatter`` uses the rest."""

    payload: Tensor  # int32[n, words - 1]
    is_good: Tensor  # bool[n]: False keeps a payload from being written
    targets: Tensor  # int64[n]: where each record goes
    laps: Tensor  # int64[n]
    records: Tensor  # int32[n, words]
    is_due: Tensor  # bool[n]
    is_stale: Tensor  # bool[n]
    n_stale: Tensor  # int64, no dimension
    spare: Tensor  # int64, no dimension: where records go that are not due

    @classmethod
    def of(cls, n: int, column: LapColumn) -> Update:
        words, device = column.records.shape[1], column.records.device
        return cls(
            payload=torch.zeros(n, words - 1, dtype=torch.int32, device=device),
            is_good=torch.ones(n, dtype=torch.bool, device=device),
            targets=torch.zeros(n, dtype=torch.int64, device=device),
            laps=torch.zeros(n, dtype=torch.int64, device=device),
            records=torch.zeros(n, words, dtype=torch.int32, device=device),
            is_due=torch.zeros(n, dtype=torch.bool, device=device),
            is_stale=torch.zeros(n, dtype=torch.bool, device=device),
            n_stale=torch.zeros((), dtype=torch.int64, device=device),
            spare=torch.full((), column.ring_rows, dtype=torch.int64, device=device),
        )

    @property
    def priorities(self) -> Tensor:
        """The payload of an update of priorities, ``float32[n]``."""
        return self.payload[:, 0].view(torch.float32)


def scatter(column: LapColumn, update: Update, indices: Tensor, seqs: Tensor, tail: Tensor, flag: Tensor, counts: Tensor) -> None:
    """Writes the records of the rows ``seqs`` whose payload is good, if ``flag`` is not 0 and the row is not older than ``tail``.

    ``indices`` are ``seqs`` modulo ring rows, both ``int64[n]``; ``tail`` and ``flag`` are elements of a draw's parameters, so that a
    captured graph replays with nothing to write. Due rows older than ``tail`` are added to ``counts[STALE]``. Where a row comes twice,
    its record is one of the two, whole.
    """
    torch.logical_and(update.is_good, flag, out=update.is_due)
    torch.lt(seqs, tail, out=update.is_stale)
    update.is_stale.logical_and_(update.is_due)
    torch.sum(update.is_stale, 0, dtype=torch.int64, out=update.n_stale)
    counts[STALE].add_(update.n_stale)
    update.is_due.logical_xor_(update.is_stale)
    torch.where(update.is_due, indices, update.spare, out=update.targets)
    torch.div(seqs, column.ring_rows, rounding_mode="floor", out=update.laps)
    torch.add(update.laps, 1, out=update.records[:, 0])
    if column.records.shape[1] == 2:  # one store a record
        update.records[:, 1:].copy_(update.payload)
        column.records.view(torch.int64).view(-1).index_copy_(0, update.targets, update.records.view(torch.int64).view(-1))
        return
    # In this order, as two operations: a reader in between still finds the lap of the row before, and takes nothing.
    column.records[:, 1:].index_copy_(0, update.targets, update.payload)
    column.records[:, 0].index_copy_(0, update.targets, update.records[:, 0])


def check_priorities(values: Tensor, is_good: Tensor, counts: Tensor) -> None:
    """Sets ``is_good`` where a value is a finite number of at least 0, and adds the others to ``counts[REFUSED]``. Values above
    ``LARGEST_PRIORITY`` become that.

    For the caller's own stream, when the values are handed over: unlike the rest it takes temporary memory.
    """
    torch.logical_and(values >= 0, values < torch.inf, out=is_good)  # neither holds for NaN
    counts[REFUSED].add_((~is_good).sum())
    values.clamp_(max=LARGEST_PRIORITY)
