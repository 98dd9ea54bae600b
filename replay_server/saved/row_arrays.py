"""Which arrays a file of rows has, what of a chunk goes into each, and back into ring bytes.

Fields keep their names. What lies beside the rows has a name with a slash, which no field's has, and is told without the ring's size:

```
beside/next            int64   seq of the lane's next row, -1 none (in the ring: its index)
beside/priority        float32 with beside/has_priority bool (in the ring: a record with the lap of its row)
overlay/FIELD          the newest value of a mutable field, with beside/has_overlay bool
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from replay_server_protocol.schema import OVERLAY_LAP, PlacedField, Schema

from replay_server.saved.tensor_file import Array, Bytes

NEXT, PRIORITY, HAS_PRIORITY, HAS_OVERLAY = "beside/next", "beside/priority", "beside/has_priority", "beside/has_overlay"
OVERLAY = "overlay/"
NO_ROW = -1

Int64s = npt.NDArray[np.int64]
_RECORD = np.dtype([("lap", "<i4"), ("priority", "<f4")])


class Kept(Protocol):
    """Rows as an observer copies them; see ``replay_server_client.look.CopiedRows``."""

    @property
    def seqs(self) -> Int64s: ...
    @property
    def rows(self) -> Bytes: ...
    @property
    def link(self) -> Int64s | None: ...
    @property
    def priority(self) -> npt.NDArray[np.float32] | None: ...
    @property
    def lap(self) -> npt.NDArray[np.int32] | None: ...
    @property
    def overlay(self) -> Bytes | None: ...


class RingBytes(NamedTuple):
    """Places for n rows as the ring holds them; None for a column it does not keep."""

    rows: Bytes  # [n, stride]
    link: Int64s | None  # [n]
    priority: npt.NDArray[np.void] | None  # [n] of (lap int32, float32)
    overlay: Bytes | None  # [n, stride of the overlay]


def arrays_of(schema: Schema, columns: tuple[str, ...], rows: int) -> list[Array]:
    """The arrays of a file of ``rows`` rows, widest items first, so that each is aligned to its own."""
    arrays = [Array(field.name, field.dtype, rows, field.shape) for field in schema]
    if "link" in columns:
        arrays.append(Array(NEXT, "int64", rows, ()))
    if "priority" in columns:
        arrays += [Array(PRIORITY, "float32", rows, ()), Array(HAS_PRIORITY, "bool", rows, ())]
    if "overlay" in columns:
        arrays += [Array(OVERLAY + field.name, field.dtype, rows, field.shape) for field in mutable(schema)]
        arrays.append(Array(HAS_OVERLAY, "bool", rows, ()))
    return sorted(arrays, key=lambda array: -np.dtype(schema_dtype(array)).itemsize)


def schema_dtype(array: Array) -> np.dtype[np.generic]:
    return PlacedField(array.name, array.dtype, array.shape, False, 0, 0).numpy_dtype


def mutable(schema: Schema) -> Iterator[PlacedField]:
    """The fields that the overlay keeps, as they lie in a record of it."""
    for field in schema.overlay or ():
        if field.name != OVERLAY_LAP:
            yield field


def save(chunk: Kept, schema: Schema, ring_rows: int, end_seq: int, scratch: Bytes, append: Callable[[str, Bytes], None]) -> None:
    """Hands the arrays of a chunk to ``append``, one at a time in ``scratch``. Links to rows from ``end_seq`` on are none."""
    seqs = chunk.seqs
    for field in schema:
        append(field.name, _packed(field, chunk.rows, scratch))
    if chunk.link is not None:
        after = seqs + (chunk.link - seqs % ring_rows) % ring_rows
        is_link = (chunk.link >= 0) & (chunk.link < ring_rows) & (after > seqs) & (after < end_seq)
        append(NEXT, _bytes(np.where(is_link, after, NO_ROW)))
    laps = (1 + seqs // ring_rows).astype(np.int32)
    if chunk.priority is not None and chunk.lap is not None:
        has = chunk.lap == laps
        append(PRIORITY, _bytes(np.where(has, chunk.priority, np.float32(0))))
        append(HAS_PRIORITY, _bytes(has))
    if chunk.overlay is not None and schema.overlay is not None:
        has = schema.overlay[OVERLAY_LAP].view(chunk.overlay) == laps
        for field in mutable(schema):
            packed = _packed(field, chunk.overlay, scratch)
            packed.reshape(len(seqs), -1)[~has] = 0
            append(OVERLAY + field.name, packed)
        append(HAS_OVERLAY, _bytes(has))


def fill(arrays: Mapping[str, Bytes], saved: Schema, seqs: Int64s, end_seq: int, ring_rows: int, into: RingBytes, ring: Schema) -> None:
    """Lays rows ``seqs`` out as a ring of ``ring_rows`` and the schema ``ring`` holds them; ``saved`` may differ in what is mutable.

    Newer values of a field that is mutable no more go into the row.
    """
    n = len(seqs)
    into.rows[:] = 0
    for field in ring:
        _lay(field, into.rows, arrays[field.name])
    if into.link is not None:
        into.link[:] = NO_ROW
        if NEXT in arrays:
            after = arrays[NEXT].view(np.int64)
            is_link = (after > seqs) & (after < end_seq)
            into.link[is_link] = after[is_link] % ring_rows
    laps = (1 + seqs // ring_rows).astype(np.int32)
    if into.priority is not None:
        into.priority[:] = np.zeros((), _RECORD)
        if PRIORITY in arrays:
            into.priority["priority"] = arrays[PRIORITY].view(np.float32)
            into.priority["lap"] = np.where(arrays[HAS_PRIORITY].view(np.bool_), laps, 0)
    if into.overlay is not None and ring.overlay is not None:
        into.overlay[:] = 0
        for field in mutable(ring):  # of one that was not mutable before the newest value is the row's
            _lay(field, into.overlay, arrays.get(OVERLAY + field.name, arrays[field.name]))
        has = arrays[HAS_OVERLAY].view(np.bool_) if HAS_OVERLAY in arrays else np.zeros(n, np.bool_)
        ring.overlay[OVERLAY_LAP].view(into.overlay)[:] = np.where(has, laps, 0)
    kept = {field.name for field in mutable(ring)}
    for field in mutable(saved):
        if field.name not in kept and HAS_OVERLAY in arrays:
            has = arrays[HAS_OVERLAY].view(np.bool_)
            row = ring[field.name]
            into.rows[has, row.offset : row.end] = arrays[OVERLAY + field.name].reshape(n, row.n_bytes)[has]


def _packed(field: PlacedField, rows: Bytes, scratch: Bytes) -> Bytes:
    """A field's values of all rows, one after the other."""
    packed = scratch[: len(rows) * field.n_bytes]
    np.copyto(packed.view(field.numpy_dtype).reshape(len(rows), *field.shape), field.view(rows))
    return packed


def _lay(field: PlacedField, rows: Bytes, packed: Bytes) -> None:
    np.copyto(field.view(rows), packed.view(field.numpy_dtype).reshape(len(rows), *field.shape))


def _bytes(values: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)
