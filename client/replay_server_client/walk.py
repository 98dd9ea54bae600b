"""Walks along ``link``: from a row through the rows its lane wrote next, as far as the window, a cut or an episode's end allow.

```
path      i0 ── link ──► i1 ── link ──► i2 ── link ──► i3         ring indices; every link is clamped into the ring, so each is readable
checks       link in the ring?          …              …         one number a step and check: 1 goes on, 0 ends the walk
             a later row of the window?
             no episode ended here?
is_alive  1              1              0              0         the running product of all checks
```

A link leads to a later row of the window iff ``place(link) > place(pred)``, with ``place(i) = (i - committed) mod ring_rows``: the ring
read from the slot after the newest row, which is 0, to the newest row. It is the rule ``seq = pred + (link - pred_index) mod ring_rows``,
``pred < seq < committed``, for every pred of a window of at most ``ring_rows`` rows, without a seq. All steps are taken before anything is
checked: what the walk reads beyond its end is thrown away, and a step costs two kernels.

Pure functions: nothing is read on the host, no shape or branch depends on a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.schema import PlacedField, Schema
from torch import Tensor

_SAME_BITS = {"uint16": torch.int16, "uint32": torch.int32, "uint64": torch.int64}
"""Torch compares few of the wide unsigned dtypes; a number is 0 in both or in neither."""


class Trail(NamedTuple):
    """``n`` walks over as many rows of a lane each, before anything is left out."""

    path: Tensor  # int64[rows, n]: ring indices
    places: Tensor  # int64[rows, n]
    is_alive: Tensor  # bool[rows, n]: the rows that a walk reaches


class Chains(NamedTuple):
    """``n`` walks that keep ``steps`` rows each, every ``stride``-th of the lane.

    After its last row a walk repeats it, with ``is_alive`` False: there is never a row of another lane.
    """

    indices: Tensor  # int64[steps, n], in [0, ring_rows)
    seqs: Tensor  # int64[steps, n]
    is_alive: Tensor  # bool[steps, n]


def follow(link: Tensor, indices: Tensor, committed: Tensor, has_ended: Sequence[Tensor], is_first: Sequence[Tensor], rows: int) -> Trail:
    """Walks ``rows`` rows from each of ``indices`` (``int64[n]``), rows of a window that ends at ``committed`` (0-dim int64).

    ``has_ended``: columns ``[ring_rows]``; a walk ends after a row where one of them is not 0. ``is_first``: a walk ends before such a
    row. Without columns walks cross episodes.
    """
    ring_rows, steps, links = len(link), [indices], []
    for _ in range(rows - 1):
        links.append(link.index_select(0, steps[-1]))
        steps.append(links[-1].clamp(0, ring_rows - 1))
    path = torch.stack(steps)
    places = (path - committed) % ring_rows
    if not links:
        return Trail(path, places, torch.ones_like(path, dtype=torch.bool))
    holds = (torch.stack(links) == path[1:]) & (places[1:] > places[:-1])  # clamping changed nothing
    for column in has_ended:
        holds &= along(column, path[:-1]) == 0
    for column in is_first:
        holds &= along(column, path[1:]) == 0
    return Trail(path, places, torch.cat((torch.ones_like(holds[:1]), torch.cumprod(holds.long(), 0) == 1)))


def keep(trail: Trail, seqs: Tensor, stride: int) -> Chains:
    """Every ``stride``-th row of a trail that began at ``seqs``; the last one reached stands for those after it."""
    path, places, is_alive = trail.path[::stride], trail.places[::stride], trail.is_alive[::stride]
    last = is_alive.sum(0) - 1
    picks = torch.minimum(torch.arange(len(path), device=path.device)[:, None], last)
    return Chains(path.gather(0, picks), places.gather(0, picks) + (seqs - places[0]), is_alive)


def along(column: Tensor, path: Tensor) -> Tensor:
    """The values of ``column[ring_rows, ...]`` at the rows of a path, ``[rows, n, ...]``."""
    return column.index_select(0, path.reshape(-1)).view(*path.shape, *column.shape[1:])


def flag_columns(rows: Tensor, fields: Sequence[PlacedField]) -> list[Tensor]:
    """Columns of ``rows`` (``uint8[any, stride]``) that are 0 where no field of one element is set; two adjacent bytes are one column."""
    if len(fields) == 2:
        low, high = sorted(fields, key=lambda field: field.offset)
        if low.n_bytes == high.n_bytes == 1 and low.end == high.offset and low.offset % 2 == 0:
            return [rows[:, low.offset : high.end].view(torch.int16)[:, 0]]
    return [flag_column(rows, field) for field in fields]


def flag_column(rows: Tensor, field: PlacedField) -> Tensor:
    """A field of one element, comparable with 0."""
    dtype: torch.dtype = _SAME_BITS.get(field.dtype) or getattr(torch, field.dtype)
    return rows[:, field.offset : field.end].view(dtype)[:, 0]


def flag_role(schema: Schema, role: str, what: str) -> PlacedField:
    """The field of one element that has ``role``; raises InvalidRequest naming the role and ``what`` needs it."""
    if role not in schema.roles:
        raise InvalidRequest(
            f"{what} needs the role {role!r}, which no field has; name it in Schema.of(..., roles={{{role!r}: FIELD}})", role=role
        )
    field = schema.role(role)
    if field.elements != 1:
        raise InvalidRequest(
            f"{what}: field {field.name!r} has the role {role!r} and must have one element, not {field.describe()}", role=role
        )
    return field
