"""A mapped ring as tensors: the rows, and the side columns that the server keeps beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from replay_server_protocol.errors import InvalidRequest, ProtocolViolation
from replay_server_protocol.messages import RingAt
from replay_server_protocol.schema import Schema
from torch import Tensor

from replay_server_client.lap_column import LapColumn

_PRIORITY_BYTES = 8
_COLUMN_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class RingTensors:
    """Views of one mapping, with no life of their own: whoever holds them drops them before it is closed.

    ``rows`` is ``uint8[ring_rows, stride]``, ``link`` ``int64[ring_rows]``: the ring index of the lane's next row, -1 for none.
    """

    rows: Tensor
    link: Tensor | None = None
    priority: LapColumn | None = None
    overlay: LapColumn | None = None

    @classmethod
    def of(cls, allocation: Tensor, at: RingAt, schema: Schema) -> RingTensors:
        """The views of ``allocation``, ``uint8[alloc_bytes]``. Raises ProtocolViolation for columns that don't fit in it."""
        rows = allocation[: at.ring_rows * schema.stride].view(at.ring_rows, schema.stride)
        link = _column(allocation, at.link_offset, at.ring_rows, 8)
        priority = _column(allocation, at.priority_offset, at.ring_rows + 1, _PRIORITY_BYTES)
        overlay = _column(allocation, at.overlay_offset, at.ring_rows + 1, schema.overlay.stride) if schema.overlay else None
        return cls(
            rows,
            link.view(torch.int64).view(-1) if link is not None else None,
            LapColumn.of(priority.view(torch.int32)) if priority is not None else None,
            LapColumn.of(overlay.view(torch.int32)) if overlay is not None else None,
        )

    @property
    def ring_rows(self) -> int:
        return len(self.rows)

    def links(self, why: str) -> Tensor:
        """The link column. Raises InvalidRequest, ``why`` it is needed, if the server keeps none."""
        if self.link is None:
            raise InvalidRequest(f"{why} follows links, which this server does not keep; serve with --columns link")
        return self.link

    def priorities(self) -> LapColumn:
        """The priority column. Raises InvalidRequest if the server keeps none."""
        if self.priority is None:
            raise InvalidRequest("by='priority' needs priorities, which this server does not keep; serve with --columns priority")
        return self.priority


NO_RING = RingTensors(torch.empty(0, 0, dtype=torch.uint8))
"""What a closed mapping shows."""


def _column(allocation: Tensor, offset: int | None, records: int, record_bytes: int) -> Tensor | None:
    if offset is None:
        return None
    end = offset + records * record_bytes
    if offset % _COLUMN_ALIGNMENT or end > len(allocation):
        raise ProtocolViolation(f"a column of {records:,} x {record_bytes} bytes at {offset:,} does not fit {len(allocation):,} bytes")
    return allocation[offset:end].view(records, record_bytes)
