"""Windows of consecutive rows of a lane, for recurrent and world-model learners: which ring rows they are, and where episodes begin.

```
lane      … a4 a5 a6|b0 b1 b2 b3 …            | an episode's end
window    a5 a6 ·  ·                          mask 1 1 0 0: a window ends with its episode (· repeats a6)
crossing  a5 a6 b0 b1                         is_first 1 0 1 0: or goes on, and says where an episode begins
```

A window always ends at a cut and at the newest row. The caller gathers the rows by ``indices.view(-1)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.schema import PlacedField, Schema
from torch import Tensor

from replay_server_client.walk import Trail, along, flag_columns, flag_role, follow, keep


@dataclass(frozen=True, slots=True)
class WindowOutputs:
    """``n`` windows of ``length`` steps; the memory is the caller's."""

    indices: Tensor  # int64[n, length]: ring rows; after the last row of a window, that row again
    seqs: Tensor  # int64[n, length]
    mask: Tensor  # bool[n, length]: a row is there
    is_first: Tensor  # bool[n, length]: the window's first step, and where an episode begins


class Windows:
    """Finds the rows of windows from their first rows. ``function`` stands for ``windows_of``.

    ``stride``: every so many rows of the lane make a step; the rows between count for ends and beginnings. ``burn_in`` first steps are for
    warming up a state: it changes no row.
    """

    def __init__(
        self,
        schema: Schema,
        length: int,
        burn_in: int,
        stride: int,
        crosses_episodes: bool,
        function: Callable[..., tuple[Tensor, ...]] | None = None,
    ) -> None:
        """Raises InvalidRequest for numbers that make no window, and for a schema without ``terminated`` unless windows cross episodes."""
        if length < 1 or stride < 1:
            raise InvalidRequest(f"sequences: length and stride are at least 1, not {length} and {stride}")
        if not 0 <= burn_in < length:
            raise InvalidRequest(f"sequences: burn_in is at least 0 and below length {length}, not {burn_in}")
        required = () if crosses_episodes else ("terminated",)
        roles = [role for role in ("terminated", "truncated") if role in schema.roles or role in required]
        self._ends: list[PlacedField] = [flag_role(schema, role, "sequences") for role in roles]
        self._firsts = [flag_role(schema, "first", "sequences")] if "first" in schema.roles else []
        self._static: dict[str, Any] = {"length": length, "stride": stride, "crosses_episodes": crosses_episodes}
        self._function = function or windows_of

    def derive(
        self, ring: Tensor, link: Tensor, start_indices: Tensor, start_seqs: Tensor, committed: Tensor, outputs: WindowOutputs
    ) -> None:
        """Fills ``outputs``. The first rows (``int64[n]`` twice) lie in a window of the ring that ends at ``committed`` (0-dim int64)."""
        ends, firsts = tuple(flag_columns(ring, self._ends)), tuple(flag_columns(ring, self._firsts))
        found = self._function(link, start_indices, start_seqs, committed, ends, firsts, **self._static)
        for fixed, result in zip((outputs.indices, outputs.seqs, outputs.mask, outputs.is_first), found, strict=True):
            fixed.copy_(result)


def windows_of(
    link: Tensor,
    indices: Tensor,
    seqs: Tensor,
    committed: Tensor,
    ends: Sequence[Tensor],
    firsts: Sequence[Tensor],
    *,
    length: int,
    stride: int,
    crosses_episodes: bool,
) -> tuple[Tensor, ...]:
    """What ``WindowOutputs`` holds. ``ends`` and ``firsts`` are columns ``[ring_rows]``, not 0 where an episode ends or begins."""
    stops: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ()) if crosses_episodes else (ends, firsts)
    trail = follow(link, indices, committed, *stops, rows=(length - 1) * stride + 1)
    chains = keep(trail, seqs, stride)
    is_first = torch.zeros_like(chains.is_alive)
    if crosses_episodes and length > 1:
        is_first = torch.cat((is_first[:1], _has_begun(trail, ends, firsts, stride) & chains.is_alive[1:]))
    is_window_start = torch.arange(length, device=link.device)[:, None] == 0
    return chains.indices.T, chains.seqs.T, chains.is_alive.T, (is_first | is_window_start).T


def _has_begun(trail: Trail, ends: Sequence[Tensor], firsts: Sequence[Tensor], stride: int) -> Tensor:
    """An episode begins at a step if one ended at the step before or at a row between, or if a row since then says it is first."""
    begins = torch.zeros_like(trail.path[1:], dtype=torch.bool)
    for column in ends:
        begins |= along(column, trail.path[:-1]) != 0
    for column in firsts:
        begins |= along(column, trail.path[1:]) != 0
    return begins.view(-1, stride, begins.shape[1]).any(1)
