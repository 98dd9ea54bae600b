"""What a learner writes about the rows of a lent batch: kept in the batch buffer until its next lease, then brought into the columns.

```
lent: update(batch, …) ─► payload, is_good ─► next sample(): given back ─► next grant into this buffer: written, then drawn anew
```

Until then the buffer still knows which rows they are. What was written about a batch whose server died is lost with its ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from replay_server_protocol.errors import InvalidRequest, shown
from replay_server_protocol.schema import Schema
from torch import Tensor

from replay_server_client.lap_column import REFUSED, LapColumn, Update, check_priorities
from replay_server_client.pinned import pinned_words
from replay_server_client.request import Request

ALL_ZERO = 2
_COUNTS = 3
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Written:
    """Records for one column: what to write for each row, and where not to."""

    payload: Tensor  # int32[rows, words - 1]
    is_good: Tensor  # bool[rows]

    @classmethod
    def of(cls, rows: int, words: int, device: torch.device, *, pin_memory: bool) -> Written:
        payload = torch.zeros(rows, words - 1, dtype=torch.int32, device=device, pin_memory=pin_memory)
        return cls(payload, torch.ones(rows, dtype=torch.bool, device=device, pin_memory=pin_memory))

    def copy_(self, other: Written) -> None:
        self.payload.copy_(other.payload, non_blocking=True)
        self.is_good.copy_(other.is_good, non_blocking=True)

    def update_of(self, column: LapColumn) -> Update:
        return replace(Update.of(len(self.payload), column), payload=self.payload, is_good=self.is_good)


class WriteBack:
    """The writes pending in one batch buffer. ``has_priorities`` and ``has_values`` say that there are some.

    ``counts`` is ``int64[3]`` on the buffer's device (lap_column's STALE and REFUSED, and ALL_ZERO draws); ``seen`` is what the host knows
    of it, never waited for.
    """

    def __init__(self, schema: Schema, request: Request, device: torch.device, *, pin_memory: bool = False) -> None:
        overlay = schema.overlay
        self.priorities = Written.of(request.n, 2, device, pin_memory=pin_memory) if request.is_by_priority else None
        words = overlay.stride // _WORD_BYTES if overlay else 0
        self.values = Written.of(request.rows, words, device, pin_memory=pin_memory) if overlay else None
        self.has_priorities = self.has_values = False
        self.counts = torch.zeros(_COUNTS, dtype=torch.int64, device=device)
        self.seen = self._host_copy(device)
        self._overlay = overlay

    def _host_copy(self, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self.counts
        return pinned_words(_COUNTS) if device.type == "cuda" else torch.zeros(_COUNTS, dtype=torch.int64)

    @property
    def is_kept(self) -> bool:
        """Whether anything can be written back at all."""
        return self.priorities is not None or self.values is not None

    def write_priorities(self, priorities: Tensor) -> None:
        """Takes ``[n]`` numbers, on the current stream; those that are no priorities are left out and counted."""
        written = self.priorities
        if written is None:
            raise InvalidRequest("this batch was not drawn by priority: sample(..., by='priority') before update_priorities()")
        count = priorities.numel()
        values, is_good = written.payload[:count, 0].view(torch.float32), written.is_good[:count]
        values.copy_(priorities.detach().reshape(-1))
        check_priorities(values, is_good, self.counts)
        written.is_good[count:] = False
        self.show(REFUSED)
        self.has_priorities = True

    def write_values(self, fields: Mapping[str, Tensor], values: Mapping[str, Tensor], mask: Tensor | None) -> None:
        """Takes new values of mutable fields, on the current stream; the other mutable ones are written as ``fields`` has them."""
        overlay, written = self._overlay, self.values
        mutable = overlay.names[1:] if overlay is not None else ()
        if not isinstance(values, Mapping):
            raise InvalidRequest(f"values={shown(values)}: a mapping of mutable fields to tensors")
        for name, value in values.items():
            if not isinstance(name, str) or name not in mutable:
                known = f"{', '.join(mutable)} are" if mutable else "no field is"
                raise InvalidRequest(
                    f"field {shown(name)} is not mutable, {known}; declare it with Field(..., mutable=True)", field=shown(name)
                )
            if not isinstance(value, Tensor):
                raise InvalidRequest(f"field {name!r}: {shown(value)} is no tensor", field=name)
            if value.shape != fields[name].shape or value.dtype != fields[name].dtype:
                raise InvalidRequest(
                    f"field {name!r}: {value.dtype} {list(value.shape)} came, {fields[name].dtype} {list(fields[name].shape)} is right",
                    field=name,
                )
        if overlay is None or written is None or not values:
            return
        payload = written.payload.view(torch.uint8)
        for name in mutable:
            field = overlay[name]
            if name in values or not self.has_values:
                value = values[name].detach() if name in values else fields[name]
                whole = value.reshape(len(payload), -1).contiguous().view(torch.uint8)
                payload[:, field.offset - _WORD_BYTES : field.end - _WORD_BYTES].copy_(whole)
        if mask is not None:
            written.is_good.copy_(mask.view(-1))
        self.has_values = True

    def forget(self) -> None:
        """Nothing of what was written will be."""
        self.has_priorities = self.has_values = False

    def copy_(self, other: WriteBack) -> None:
        """Takes over what was written in ``other``, the buffer that the caller was lent, on the current stream."""
        if not (other.has_priorities or other.has_values):
            return
        for mine, theirs in ((self.priorities, other.priorities), (self.values, other.values)):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

    def show(self, *elements: int) -> None:
        """Lets ``seen`` follow ``counts``, on the current stream."""
        if self.seen is not self.counts:
            for element in elements:
                self.seen[element : element + 1].copy_(self.counts[element : element + 1], non_blocking=True)

    def show_all(self) -> None:
        """As ``show``, for every element that can change."""
        if self.seen is not self.counts and self.is_kept:
            self.seen.copy_(self.counts, non_blocking=True)

    def seen_counts(self) -> tuple[int, int, int]:
        """STALE, REFUSED and ALL_ZERO as far as the host knows."""
        stale, refused, all_zero = self.seen.tolist()
        return stale, refused, all_zero
