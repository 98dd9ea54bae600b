"""The newest values of mutable fields, laid over gathered rows: a record of the overlay column counts if its lap is the row's own."""

from __future__ import annotations

import torch
from replay_server_protocol.schema import Schema
from torch import Tensor

from replay_server_client.lap_column import LapColumn

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Overlay:
    """Made once for the ``rows`` (``uint8[n, stride]``) of a batch buffer."""

    def __init__(self, schema: Schema, overlay: Schema, column: LapColumn, rows: Tensor) -> None:
        self._column = column
        self._fields: list[tuple[int, int, Tensor]] = []
        for field in overlay.fields[1:]:
            placed = schema[field.name]
            under = rows[:, placed.offset : placed.end].view(_SAME_SIZE[field.numpy_dtype.itemsize])
            self._fields.append((field.offset, field.end, under))

    def lay(self, indices: Tensor, seqs: Tensor) -> None:
        """Overwrites mutable fields in the rows ``seqs`` (``int64[n]``, ring rows ``indices``) where a learner has written newer values."""
        # Laps first and apart: a writer brings in the lap last, so that with a lap found now comes all of its payload.
        laps = self._column.laps.index_select(0, indices)
        records = self._column.records.index_select(0, indices)
        is_own = (laps == 1 + seqs // self._column.ring_rows)[:, None]
        for start, end, under in self._fields:
            over = records.view(torch.uint8)[:, start:end].view(under.dtype)
            torch.where(is_own, over, under, out=under)
