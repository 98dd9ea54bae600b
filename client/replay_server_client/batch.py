"""A batch: gathered rows in one of a sampler's fixed batch buffers, seen as tensors that are views of it.

```
rows: uint8[n, stride]   |obs      |action   |reward|pad|
                          ^ batch["obs"]: rows[:, offset:end] as dtype[n, *shape]
                          |<- span("obs", "action"): dtype[n, elements] ->|
```

Views are made once for each batch buffer, so a batch's tensors have the addresses of the batch that used the same buffer before.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType

import torch
from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.schema import PlacedField, Schema
from torch import Tensor

from replay_server_client.draw import Drawn

_DRAWN_BYTES = 16
"""A row's seq and ring index."""


class BatchBuffer:
    """Device memory for one batch of ``n`` rows, with the views of it. ``number`` is its place among the sampler's batch buffers.

    ``block`` holds rows, seqs and indices, in this order: what was gathered elsewhere comes over in one copy.
    """

    def __init__(self, number: int, schema: Schema, n: int, device: torch.device, *, pin_memory: bool = False) -> None:
        self.number = number
        self.schema = schema
        rows_bytes = n * schema.stride
        self.block = torch.zeros(rows_bytes + n * _DRAWN_BYTES, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        self.rows = self.block[:rows_bytes].view(n, schema.stride)
        self.drawn = Drawn.into(self.block[rows_bytes:].view(torch.int64))
        self.fields: Mapping[str, Tensor] = MappingProxyType({field.name: _field_view(self.rows, field) for field in schema})
        self._spans: dict[tuple[str, ...], Tensor] = {}
        self._compact: dict[str, Tensor] = {}

    def field(self, name: str) -> Tensor:
        if name not in self.fields:
            raise InvalidRequest(f"there is no field {name!r}; the schema has {', '.join(self.schema.names)}", field=name)
        return self.fields[name]

    def span(self, *names: str) -> Tensor:
        if names not in self._spans:
            self._spans[names] = self._make_span(names)
        return self._spans[names]

    def compact(self, name: str) -> Tensor:
        field = self.field(name)
        if name not in self._compact:
            self._compact[name] = torch.empty(field.shape, dtype=field.dtype, device=field.device)
        return self._compact[name].copy_(field)

    def _make_span(self, names: tuple[str, ...]) -> Tensor:
        if not names:
            raise InvalidRequest("span() needs at least one field")
        for name in names:
            self.field(name)
        fields = [self.schema[name] for name in names]
        for before, after in pairwise(fields):
            if before.dtype != after.dtype:
                raise InvalidRequest(f"span: {before.name!r} is {before.dtype}, {after.name!r} is {after.dtype}; a span has one dtype")
            if before.end != after.offset:
                raise InvalidRequest(
                    f"span: {after.name!r} does not follow {before.name!r} in the row without a gap "
                    f"(byte {after.offset}, not {before.end}); name adjacent fields in the schema's order"
                )
        return _typed(self.rows, fields[0].offset, fields[-1].end, fields[0].dtype)


class Batch:
    """``n`` rows drawn from one window.

    ``batch["obs"]`` and ``batch.fields`` are views of the rows; they hold until the next ``sample()`` of the same request, after which
    every use of the batch's tensors raises InvalidRequest. ``window`` is the (tail, committed) it was drawn from, ``number`` the request's
    number, ``buffer`` says which of the prefetch + 1 batch buffers it lies in.
    """

    __slots__ = ("_memory", "buffer", "number", "window")

    def __init__(self, memory: BatchBuffer, number: int, window: tuple[int, int]) -> None:
        self._memory: BatchBuffer | None = memory
        self.buffer = memory.number
        self.number = number
        self.window = window

    def __getitem__(self, name: str) -> Tensor:
        """The field's values, ``dtype[n, *shape]``, as a view of the rows."""
        return self._valid().field(name)

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """All fields by name, in the schema's order."""
        return self._valid().fields

    def span(self, *names: str) -> Tensor:
        """Adjacent fields of one dtype as one view ``dtype[n, elements]``. Raises InvalidRequest where the row has a gap between them."""
        return self._valid().span(*names)

    def compact(self, name: str) -> Tensor:
        """The field copied to contiguous memory, on the current stream; its address is the batch buffer's, like that of the views."""
        return self._valid().compact(name)

    @property
    def seqs(self) -> Tensor:
        """Absolute numbers of the rows, ``int64[n]``."""
        return self._valid().drawn.seqs

    @property
    def indices(self) -> Tensor:
        """Where the rows lay in the ring, ``int64[n]``."""
        return self._valid().drawn.indices

    @property
    def weights(self) -> Tensor:
        """Importance weights, ``float32[n]``."""
        return self._valid().drawn.weights

    def expire(self) -> None:
        """The batch buffer goes back to its sampler."""
        self._memory = None

    def __len__(self) -> int:
        return len(self._valid().rows)

    def __repr__(self) -> str:
        return f"Batch(number={self.number}, window={self.window}, buffer={self.buffer}{', expired' if self._memory is None else ''})"

    def _valid(self) -> BatchBuffer:
        if self._memory is None:
            raise InvalidRequest(
                f"batch {self.number} ended with the next sample() of its request: its batch buffer {self.buffer} holds other rows by now; "
                "clone what must live longer"
            )
        return self._memory


def _field_view(rows: Tensor, field: PlacedField) -> Tensor:
    return _typed(rows, field.offset, field.end, field.dtype).view(len(rows), *field.shape)


def _typed(rows: Tensor, start: int, end: int, dtype: str) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    return rows[:, start:end].view(kind)
