"""One slot being filled: rows are placed field by field, checked and counted once when the slot is handed over.

```
slot   | row 0 | row 1 | …                    | free …        |   uint8[slot_rows, stride] in the segment
lanes  |   0   |   1   | … lanes-1 | 0 | ~1 | … |               int32 a row: its lane, ~lane where no link leads into the row
```

A step (one row a lane) is never split over two slots. Rows left out by a mask take no place; the lane's chain goes on over them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from replay_server_protocol.errors import InvalidRequest, RowsRejected, shown
from replay_server_protocol.moments import SCALARS, Moments, Scalars, are_tame, scalars_of
from replay_server_protocol.schema import PlacedField
from replay_server_protocol.versions import pack_versions

from replay_server_client.episodes import LaneSums
from replay_server_client.rows import Array, Bools, RowBlock, version_array
from replay_server_client.slot_plan import SlotPlan


@dataclass(frozen=True, slots=True)
class Filled:
    """What a PUBLISH says of the rows of a filled slot."""

    rows: int
    rejected: int
    nonfinite: int
    lanes: bytes
    moments: list[bytes]
    episodes: bytes
    versions: bytes
    offender: tuple[str, int] | None
    """The first row rejected or nonfinite: the field, and the row's place among those placed."""


class SlotWriter:
    """Fills one slot, again and again: ``reset``, ``place`` …, ``finish``. ``rows`` counts the rows placed since ``reset``."""

    device: ClassVar[None] = None  # a DeviceSlot's says where its rows come from
    is_settled: ClassVar[bool] = True
    """The bytes are in the slot."""

    def __init__(self, index: int, rows_bytes: npt.NDArray[np.uint8], plan: SlotPlan) -> None:
        self.index = index
        self.rows = 0
        self._bytes = rows_bytes
        self._plan = plan
        self._views = tuple(field.view(rows_bytes) for field in plan.schema)
        self._view_of = dict(zip(plan.schema.names, self._views, strict=True))
        self._lane_of = np.empty(plan.slot_rows if plan.keeps_lanes else 0, np.int32)
        self._is_plain = True  # whole steps over all lanes in order, nothing cut

    @property
    def is_full(self) -> bool:
        """No room for another whole step."""
        return self._plan.slot_rows - self.rows < self._plan.lanes

    @property
    def version_field(self) -> PlacedField | None:
        return self._plan.version

    def reset(self) -> None:
        self.rows = 0
        self._is_plain = True

    def view(self, name: str) -> Array:
        """The field's column of all whole steps of the slot; raises SchemaMismatch for another name."""
        lanes = self._plan.lanes
        self._plan.schema[name]
        return self._view_of[name][: self._plan.slot_rows // lanes * lanes]

    def place(self, block: RowBlock, start: int) -> int:
        """Places whole steps of ``block`` from its row ``start`` on, as many as fit. Returns how many of the block's rows were taken."""
        lanes, at = self._plan.lanes, self.rows
        room = self._plan.slot_rows - at
        if block.kept_before is None or block.mask is None:
            kept = taken = min(block.rows - start, room // lanes * lanes)
            mask = None
            for view, array in zip(self._views, block.arrays, strict=True):
                view[at : at + taken] = array[start : start + taken]
        else:
            step = start // lanes
            before = block.kept_before
            last = int(np.searchsorted(before, before[step] + room, side="right")) - 1
            kept, taken = int(before[last] - before[step]), (last - step) * lanes
            mask = block.mask[start : start + taken]
            for view, array in zip(self._views, block.arrays, strict=True):
                view[at : at + kept] = array[start : start + taken][mask]
        if block.final_mask is not None:
            self._patch(block, start, start + taken, mask)
        self._claim(kept, mask)
        return taken

    def claim(self, rows: int, mask: Bools | None = None) -> None:
        """Counts the next ``rows`` rows (whole steps), whose bytes are in place by now: only those of ``mask``, closed up."""
        self._claim(rows if mask is None else int(mask.sum()), mask)

    def seal(self) -> None:
        """No more rows are placed before ``finish``."""

    def finish(self) -> Filled:
        """Applies the non-finite policy, takes the moments and says what the slot holds now (``rows`` may have become less).

        Under ``reject`` the rows left close up, and a lane that lost a row is cut there.
        """
        rejected = nonfinite = 0
        offender: tuple[str, int] | None = None
        plan, rows = self._plan, self.rows
        columns = {field.name: self._view_of[field.name][:rows].astype(np.float64) for field in plan.scalars} if rows else {}
        scalars = {name: scalars_of(column) for name, column in columns.items()}
        for field in plan.checked:
            finite = None if scalars.get(field.name) else self._finite_rows(field)
            if finite is None:
                continue
            offender = offender or (field.name, int(finite.argmin()))
            if plan.nonfinite == "count":
                nonfinite += self.rows - int(finite.sum())
            else:
                rejected += self._reject(finite)
        if rejected:
            scalars, columns = {}, {}
        if not self.rows:
            return Filled(0, rejected, nonfinite, b"", [], b"", b"", offender)
        returns, episodes = (b"", b"") if plan.sums is None else self._along_lanes(plan.sums, columns, scalars)
        packed = {name: SCALARS.pack(*known) for name, known in scalars.items() if known is not None}
        moments = [returns if field is None else packed.get(field.name) or self._moments(field) for field in plan.moments]
        lanes = b"" if self._is_plain or not plan.links else self._lane_of[: self.rows].tobytes()
        versions = b"" if plan.version is None else pack_versions(self._view_of[plan.version.name][: self.rows])  # type: ignore[arg-type]
        return Filled(self.rows, rejected, nonfinite, lanes, moments, episodes, versions, offender)

    def _patch(self, block: RowBlock, start: int, stop: int, mask: Bools | None) -> None:
        """Puts the final values of the rows of ``final_mask`` in their places; the claim that follows makes them count."""
        ends = block.final_mask[start:stop]  # type: ignore[index]
        source = np.flatnonzero(ends if mask is None else ends & mask) + start
        place = self.rows + np.flatnonzero(ends if mask is None else ends[mask])
        for index, array in block.final:
            self._views[index][place] = array[source]

    def _claim(self, rows: int, mask: Bools | None) -> None:
        """The rows count last: a call that Ctrl-C ends before that has placed none, and none without its lane."""
        plan, at = self._plan, self.rows
        if plan.keeps_lanes:
            lane_of = self._lane_of[at : at + rows]
            if mask is None:
                lane_of[:] = plan.lane_of[:rows]
            else:
                lane_of[:] = np.resize(plan.lane_of[: plan.lanes], len(mask))[mask]
                self._is_plain = False
            if plan.chains.has_cut and rows:
                plan.chains.mark(lane_of)
                self._is_plain = False
        self.rows = at + rows

    def _finite_rows(self, field: PlacedField) -> Bools | None:
        """Which rows are finite throughout in ``field``; None when all are."""
        finite = np.isfinite(self._floats(field))
        return None if finite.all() else finite.reshape(self.rows, -1).all(1)

    def _floats(self, field: PlacedField) -> npt.NDArray[np.floating]:
        """The field's column of the rows placed; bfloat16 widened to float32, of which it is the upper half."""
        column = self._view_of[field.name][: self.rows]
        if field.dtype == "bfloat16":
            return (column.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return column  # type: ignore[return-value]

    def _moments(self, field: PlacedField) -> bytes:
        """Packed moments of the rows that are finite."""
        values: npt.NDArray[np.generic] = self._floats(field)
        finite = self._finite_rows(field)
        if finite is not None:
            values = values[finite]
        with np.errstate(over="ignore", invalid="ignore"):  # a sum beyond float64, and one of infinities of both signs
            moments = Moments.of(values) if len(values) else Moments.empty(field.elements)
        return (moments if np.isfinite(moments.mean).all() else Moments.empty(field.elements)).pack()  # a sum beyond float64

    def _along_lanes(
        self, sums: LaneSums, columns: Mapping[str, npt.NDArray[np.float64]], scalars: Mapping[str, Scalars | None]
    ) -> tuple[bytes, bytes]:
        """Packed moments of the running return, and the episodes that ended. ``columns`` were read before, for ``scalars``."""
        fields, n = sums.fields, self.rows
        name = fields.reward.name
        rewards = columns[name] if name in columns else self._floats(fields.reward).reshape(n).astype(np.float64)
        first, *others = [self._is_set(field) for field in fields.ends] or [np.zeros(n, np.bool_)]
        ends = functools.reduce(np.logical_or, others, first)
        firsts = None if fields.first is None else self._is_set(fields.first)
        return sums.take(rewards, ends, firsts, None if self._is_plain else self._lane_of[:n], are_tame=are_tame(scalars.get(name)))

    def _is_set(self, field: PlacedField) -> Bools:
        """Where a field of one value a row is not 0."""
        is_set: Bools = self._view_of[field.name][: self.rows].reshape(self.rows) != 0
        return is_set

    def _reject(self, finite: Bools) -> int:
        rows = self.rows
        if self._plan.keeps_lanes:
            self._cut_around(finite)
            self._lane_of[: int(finite.sum())] = self._lane_of[:rows][finite]
        self.rows = int(finite.sum())
        self._bytes[: self.rows] = self._bytes[:rows][finite]
        return rows - self.rows

    def _cut_around(self, kept: Bools) -> None:
        """Cuts each lane after its dropped rows: at its next row in this slot, or at its first one in the next."""
        marked = self._lane_of[: self.rows]
        lane_of = np.where(marked < 0, ~marked, marked)
        order = np.argsort(lane_of, kind="stable")
        lane, is_kept = lane_of[order], kept[order]
        is_last = np.append(lane[1:] != lane[:-1], True)
        follows_dropped = np.append(False, ~is_kept[:-1] & ~is_last[:-1])
        at = order[follows_dropped & is_kept]
        marked[at] = ~lane_of[at]
        self._plan.chains.cut(lane[is_last & ~is_kept])
        self._is_plain = False


class LentSlot:
    """A free slot to write into without a copy: ``slot["obs"][:k] = …``, then ``slot.rows = k``, a multiple of the lanes.

    ``slot[name]`` is the field as ``dtype[max_rows, *shape]`` (bfloat16: the uint16 of its bits), valid inside the ``with`` block only.
    """

    def __init__(self, writer: SlotWriter, max_rows: int, lanes: int) -> None:
        self.max_rows = max_rows
        self._writer = writer
        self._lanes = lanes
        self._rows: int | None = None
        self._named: set[str] = set()
        self._is_over = False

    def __getitem__(self, name: str) -> Array:
        """The field's column. Raises InvalidRequest after the ``with`` block: the slot is the server's then."""
        if self._is_over:
            raise InvalidRequest("this slot was handed over with its with block; lend another with collector.slot()")
        column = self._writer.view(name)
        self._named.add(name)
        return column

    def stamp(self, version: int) -> None:
        """Writes the policy's version into the rows, if the schema has a field for it that was not named in the block."""
        field = self._writer.version_field
        if field is not None and field.name not in self._named:
            self._writer.view(field.name)[: self.checked_rows()] = version_array(version, field.numpy_dtype)

    def end(self) -> None:
        self._is_over = True

    def checked_rows(self) -> int:
        """``rows``, which must have been set: a forgotten count would drop rows in silence."""
        if self._rows is None:
            raise RowsRejected("slot.rows was not set: say how many leading rows were filled, 0 for none")
        return self._rows

    @property
    def rows(self) -> int:
        return self._rows or 0

    @rows.setter
    def rows(self, rows: int) -> None:
        if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or not 0 <= rows <= self.max_rows or rows % self._lanes:
            raise RowsRejected(
                f"slot.rows = {shown(rows)}: must be a multiple of {self._lanes} lanes from 0 to {self.max_rows}",
                rows=rows,
                max_rows=self.max_rows,
            )
        self._rows = int(rows)
