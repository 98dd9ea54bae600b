"""A sampler's fixed memory for one batch: rows, what was drawn, what was derived, and the views of all that.

```
block: | rows: uint8[rows, stride]                  | seqs | indices | weights | … of n or (n, length) elements each |
       |obs      |action   |reward|pad|
        ^ field("obs"): rows[:, offset:end] as dtype[n, *shape], or dtype[n, length, *shape] of sequences
        |<- span("obs", "action"): dtype[n, elements] ->|
```

Views are made once, so a batch's tensors have the addresses of the batch that used the same memory before; and all of a batch lies in
one block, so that what was gathered elsewhere comes over in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType

import torch
from replay_server_protocol.errors import InvalidRequest, shown
from replay_server_protocol.schema import PlacedField, Schema
from torch import Tensor

from replay_server_client.draw import Drawn
from replay_server_client.request import Request
from replay_server_client.write_back import WriteBack


class BatchBuffer:
    """Device memory for one batch of ``request``. ``number`` is its place among the sampler's batch buffers.

    ``results`` holds by name, always: ``seqs``, ``indices`` (int64) and ``weights`` (float32) of the n draws; for n-step transitions
    ``n_steps`` (int64), ``discount`` and ``bootstrap`` (float32); for sequences ``row_seqs``, ``row_indices`` (int64), ``mask`` and
    ``is_first`` (bool), all of (n, length). Where masses are told: ``masses`` (float64) of the n draws, ``mass_sums`` (float64[2]).
    """

    def __init__(self, number: int, schema: Schema, request: Request, device: torch.device, *, pin_memory: bool = False) -> None:
        self.number = number
        self.schema = schema
        self.request = request
        parts = _parts(request)
        rows_bytes = request.rows * schema.stride
        n_bytes = rows_bytes + sum(dtype.itemsize * math.prod(shape) for dtype, shape in parts.values())
        self.block = torch.zeros(n_bytes, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        self.rows = self.block[:rows_bytes].view(request.rows, schema.stride)
        self.results = _carve(self.block[rows_bytes:], parts)
        self.results["weights"].fill_(1)
        self.write_back = WriteBack(schema, request, device, pin_memory=pin_memory)
        self.drawn = Drawn.into(self.results["seqs"], self.results["indices"], self.results["weights"])
        self.fields: Mapping[str, Tensor] = MappingProxyType({field.name: self._field_view(field) for field in schema})
        self._spans: dict[tuple[str, ...], Tensor] = {}
        self._made: dict[str, Tensor] = {}

    @property
    def seqs(self) -> Tensor:
        """Absolute numbers of the rows, ``int64[n]`` or ``int64[n, length]``."""
        return self.results["row_seqs" if self.request.length else "seqs"]

    @property
    def indices(self) -> Tensor:
        """Ring indices of the rows, shaped as ``seqs``."""
        return self.results["row_indices" if self.request.length else "indices"]

    def field(self, name: str) -> Tensor:
        if not isinstance(name, str) or name not in self.fields:
            raise InvalidRequest(f"there is no field {shown(name)}; the schema has {', '.join(self.schema.names)}", field=shown(name))
        return self.fields[name]

    def span(self, *names: str) -> Tensor:
        for name in names:
            self.field(name)
        if names not in self._spans:
            self._spans[names] = self._make_span(names)
        return self._spans[names]

    def compact(self, name: str) -> Tensor:
        field = self.field(name)
        return self._into(f"compact {name}", field).copy_(field)

    def result(self, name: str) -> Tensor:
        """A result of this request's draws. Raises InvalidRequest if its kind has none of that name."""
        if name not in self.results:
            kind = "sequences have" if self.request.length else "transitions have"
            raise InvalidRequest(f"{kind} no {shown(name)}; learner.{'sample' if self.request.length else 'sequences'}() gives it")
        return self.results[name]

    def discount(self) -> Tensor:
        """Of one step, made on the current stream: gamma for every row."""
        return self._into("discount", self.results["weights"]).fill_(self.request.gamma)

    def one_step_bootstrap(self) -> Tensor:
        """Of one step, made on the current stream: gamma, 0 where terminated."""
        if "terminated" not in self.schema.roles:
            raise InvalidRequest("bootstrap needs a field with the role 'terminated'; name it in Schema.of(..., roles=...)")
        lives = torch.logical_not(self.fields[self.schema.roles["terminated"]].view(-1), out=self._into("lives", self.results["weights"]))
        return torch.mul(lives, self.request.gamma, out=self._into("bootstrap", lives))

    def n_steps(self) -> Tensor:
        """Of one step: 1 for every row."""
        return self._into("n_steps", self.results["seqs"]).fill_(1)

    def loss_mask(self) -> Tensor:
        """``mask`` without the burn-in, made on the current stream."""
        mask = self.result("mask")
        loss_mask = self._into("loss_mask", mask).copy_(mask)
        loss_mask[:, : self.request.burn_in] = False
        return loss_mask

    def _into(self, name: str, like: Tensor) -> Tensor:
        """Memory of a lasting address for what is made when it is asked for."""
        if name not in self._made:
            self._made[name] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return self._made[name]

    def _field_view(self, field: PlacedField) -> Tensor:
        return typed(self.rows, field.offset, field.end, field.dtype).view(*self.request.shape, *field.shape)

    def _make_span(self, names: tuple[str, ...]) -> Tensor:
        if not names:
            raise InvalidRequest("span() needs at least one field")
        fields = [self.schema[name] for name in names]
        for before, after in pairwise(fields):
            if before.dtype != after.dtype:
                raise InvalidRequest(f"span: {before.name!r} is {before.dtype}, {after.name!r} is {after.dtype}; a span has one dtype")
            if before.end != after.offset:
                raise InvalidRequest(
                    f"span: {after.name!r} does not follow {before.name!r} in the row without a gap "
                    f"(byte {after.offset}, not {before.end}); name adjacent fields in the schema's order"
                )
        return typed(self.rows, fields[0].offset, fields[-1].end, fields[0].dtype).view(*self.request.shape, -1)


def typed(rows: Tensor, start: int, end: int, dtype: str) -> Tensor:
    """Bytes ``start`` to ``end`` of each row as ``dtype[rows, elements]``."""
    kind: torch.dtype = getattr(torch, dtype)
    return rows[:, start:end].view(kind)


def _parts(request: Request) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of each result, the largest items first: so each is aligned."""
    n: tuple[int, ...] = (request.n,)
    rows = request.shape
    parts = {"seqs": (torch.int64, n), "indices": (torch.int64, n), "weights": (torch.float32, n)}
    if request.length:
        parts |= {"row_seqs": (torch.int64, rows), "row_indices": (torch.int64, rows)}
        parts |= {"mask": (torch.bool, rows), "is_first": (torch.bool, rows)}
    elif request.n_step > 1:
        parts |= {"n_steps": (torch.int64, n), "discount": (torch.float32, n), "bootstrap": (torch.float32, n)}
    if request.tells_mass:
        parts |= {"masses": (torch.float64, n), "mass_sums": (torch.float64, (2,))}
    return dict(sorted(parts.items(), key=lambda part: -part[1][0].itemsize))


def _carve(block: Tensor, parts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    results, start = {}, 0
    for name, (dtype, shape) in parts.items():
        end = start + dtype.itemsize * math.prod(shape)
        results[name] = block[start:end].view(dtype).view(shape)
        start = end
    return results
