"""Rows looked at without sampling them: copied out of the window chunk by chunk, each chunk under a short lease of its own.

```
OBSERVE ─► GRANT [tail, committed) ─► copy runs of rows into the bounce ─► copy seen complete ─► clock <= deadline? ─► RELEASE
                     │                                                                                └─ no: the chunk again
                     └─ rows below the tail by now are overtaken: left out, and reported
```

Under a lease no row of its window is overwritten, and past its deadline every row may have been: so a chunk counts only if the clock was
read after its copy was complete and shows a time within the lease. A lease counts for nothing: no samples per insert, no batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from replay_server_protocol.errors import InvalidRequest, ReplayTimeout, ServerGone, shown
from replay_server_protocol.messages import Grant, RingAt
from replay_server_protocol.schema import OVERLAY_LAP, Schema

from replay_server_client.bounce import Bounce, HostBounce
from replay_server_client.deadline import Deadline

T = TypeVar("T")
Seqs = npt.NDArray[np.int64]
Selection = int | Sequence[int] | Seqs

_LATE_IN_A_ROW = 3
_NAMED = 8
_MANY_RUNS = 8
_PRIORITY = np.dtype([("lap", "<i4"), ("priority", "<f4")])


@dataclass(frozen=True, slots=True)
class Ring:
    """What is known of the ring that the next lease is about."""

    at: RingAt
    schema: Schema

    @property
    def columns(self) -> dict[str, tuple[int, int]]:
        """(offset in the allocation, bytes of a record) of the rows and of each side column that is kept."""
        at, overlay = self.at, self.schema.overlay
        found = {
            "rows": (0, self.schema.stride),
            "link": (at.link_offset, 8),
            "priority": (at.priority_offset, _PRIORITY.itemsize),
            "overlay": (at.overlay_offset, overlay.stride if overlay is not None else 0),
        }
        return {name: (offset, n_bytes) for name, (offset, n_bytes) in found.items() if offset is not None}

    @property
    def record_bytes(self) -> int:
        """Bytes of one row with its side columns."""
        return sum(n_bytes for _, n_bytes in self.columns.values())


class LeaseSource(Protocol):
    """Where leases to look come from."""

    def ring(self, deadline: Deadline) -> Ring:
        """The proved ring. Waits for it; raises ReplayTimeout naming what is missing."""

    def under_lease(self, work: Callable[[Grant, Bounce], T], deadline: Deadline) -> T | None:
        """What ``work`` made under a lease; None when it was complete too late, or the ring was lost meanwhile."""


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows as they lie in the ring: views of the bounce, valid until the next chunk.

    ``seqs`` int64[n]; ``rows`` uint8[n, stride]; ``link`` int64[n], the ring index of the lane's next row, -1 none; ``priority``
    float32[n] with ``lap`` int32[n], which is 1 + seq // ring_rows where the priority is this row's; ``overlay`` uint8[n, bytes], records
    of ``schema.overlay``. Columns that the server doesn't keep are None. ``overtaken`` are seqs asked for that had left the window.
    """

    seqs: Seqs
    rows: npt.NDArray[np.uint8]
    link: npt.NDArray[np.int64] | None
    priority: npt.NDArray[np.float32] | None
    lap: npt.NDArray[np.int32] | None
    overlay: npt.NDArray[np.uint8] | None
    overtaken: Seqs
    window: tuple[int, int]
    ring: Ring

    def newest_rows(self) -> npt.NDArray[np.uint8]:
        """A copy of the rows, uint8[n, stride], with the newest values of mutable fields."""
        schema, found = self.ring.schema, self.rows.copy()
        if self.overlay is not None and schema.overlay is not None:
            laps = (1 + self.seqs // self.ring.at.ring_rows).astype(np.int32)
            is_newer = schema.overlay[OVERLAY_LAP].view(self.overlay) == laps
            for field in schema.overlay:
                if field.name in schema.names:
                    schema[field.name].view(found)[is_newer] = field.view(self.overlay)[is_newer]
        return found

    def fields(self, names: Sequence[str] | None = None) -> dict[str, npt.NDArray[np.generic]]:
        """Copies of the rows' fields, ``dtype[n, *shape]``, with the newest values of mutable ones; bfloat16 as the uint16 of its bits."""
        schema, laps = self.ring.schema, (1 + self.seqs // self.ring.at.ring_rows).astype(np.int32)
        found = {field.name: field.view(self.rows).copy() for field in schema if names is None or field.name in names}
        if self.overlay is not None and schema.overlay is not None:
            is_newer = schema.overlay[OVERLAY_LAP].view(self.overlay) == laps
            for field in schema.overlay:
                if field.name in found:
                    found[field.name][is_newer] = field.view(self.overlay)[is_newer]
        return found


@dataclass(frozen=True, slots=True)
class Rows:
    """Copies of rows: ``fields`` by name, ``seqs`` int64[n] in the order asked for, ``overtaken`` those that left the window before they
    were copied, ``window`` (tail, committed) when the look began."""

    fields: dict[str, npt.NDArray[np.generic]]
    seqs: Seqs
    overtaken: Seqs
    window: tuple[int, int]

    def __len__(self) -> int:
        return len(self.seqs)

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        if name not in self.fields:
            raise InvalidRequest(f"there is no field {shown(name)}; the rows have {', '.join(self.fields)}")
        return self.fields[name]


def window(source: LeaseSource, deadline: Deadline) -> tuple[int, int]:
    """(tail, committed) of now."""
    return _leased(source, lambda grant, bounce: (grant.tail, grant.committed), deadline)


def chunks(source: LeaseSource, seqs: Seqs, deadline: Deadline, most_rows: int | None = None) -> Iterator[CopiedRows]:
    """The rows ``seqs``, at most ``most_rows`` at a time and as many as the bounce holds. Costs the ring's ingest nothing but the leases.

    Raises ReplayTimeout at the deadline or after three copies in a row that took longer than their lease.
    """
    begin = 0
    while begin < len(seqs):
        chunk = _leased(source, _copier(source.ring(deadline), seqs[begin:], most_rows), deadline)
        begin += len(chunk.seqs) + len(chunk.overtaken)
        yield chunk


def _copier(ring: Ring, asked: Seqs, most_rows: int | None) -> Callable[[Grant, Bounce], CopiedRows]:
    def copied(grant: Grant, bounce: Bounce) -> CopiedRows:
        n = len(bounce.memory) // ring.record_bytes
        return copy_rows(ring, asked[: min(n, most_rows or n)], grant, bounce)

    return copied


def read(source: LeaseSource, seqs: Seqs, bounds: tuple[int, int], deadline: Deadline, fields: Sequence[str] | None = None) -> Rows:
    """Copies of the rows ``seqs``, all of them within ``bounds``."""
    schema = source.ring(deadline).schema
    names = schema.names if fields is None else [schema[name].name for name in fields]
    found = {name: np.empty((len(seqs), *schema[name].shape), schema[name].numpy_dtype) for name in names}
    copied, overtaken, end = np.empty(len(seqs), np.int64), [np.empty(0, np.int64)], 0
    for chunk in chunks(source, seqs, deadline):
        begin, end = end, end + len(chunk.seqs)
        copied[begin:end] = chunk.seqs
        overtaken.append(chunk.overtaken)
        for name, values in chunk.fields(names).items():
            found[name][begin:end] = values
    return Rows({name: values[:end] for name, values in found.items()}, copied[:end], np.concatenate(overtaken), bounds)


def chosen_seqs(bounds: tuple[int, int], newest: int | None, seqs: Selection | None) -> Seqs:
    """The seqs of ``newest=k`` (the last k of the window, oldest first) or ``seqs=``. Raises InvalidRequest naming seqs outside it."""
    tail, committed = bounds
    if seqs is None:
        if not isinstance(newest, int) or isinstance(newest, bool) or newest < 1:
            raise InvalidRequest(f"newest={shown(newest)}: a number of rows, at least 1")
        return np.arange(max(tail, committed - newest), committed)
    try:
        asked = np.atleast_1d(np.asarray(seqs))
        if asked.ndim != 1 or (asked.size and asked.dtype.kind not in "iu"):
            raise ValueError("integers in one dimension are right")
        asked = asked.astype(np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"seqs={shown(seqs)}: {str(error)[:80]}") from error
    outside = asked[(asked < tail) | (asked >= committed)]
    if len(outside):
        more = f" and {len(outside) - _NAMED:,} more" if len(outside) > _NAMED else ""
        named = ", ".join(map(str, outside[:_NAMED]))
        seqs_are = f"seq {named} is" if len(outside) == 1 else f"seqs {named}{more} are"
        raise InvalidRequest(
            f"{seqs_are} not in the window [{tail}, {committed}): {'it is empty' if tail == committed else 'ask within it'}",
            tail=tail,
            committed=committed,
        )
    return asked


def _leased(source: LeaseSource, work: Callable[[Grant, Bounce], T], deadline: Deadline) -> T:
    for _ in range(_LATE_IN_A_ROW):
        done = source.under_lease(work, deadline)
        if done is not None:
            return done
    raise ReplayTimeout(f"{_LATE_IN_A_ROW} copies in a row took longer than their lease: serve with a longer --lease, or free this machine")


def copy_rows(ring: Ring, asked: Seqs, grant: Grant, bounce: Bounce) -> CopiedRows:
    """Copies what of ``asked`` is in the granted window, a run of neighbours at a time, and waits for that."""
    if grant.generation != ring.at.generation:
        raise ServerGone("the server restarted while its rows were being read: the rest of them are lost; read again")
    seqs = asked[(asked >= grant.tail) & (asked < grant.committed)]
    overtaken = asked[asked < grant.tail]
    indices = seqs % ring.at.ring_rows
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    begins, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(seqs)]
    at, places = 0, {}
    for name, (offset, n_bytes) in ring.columns.items():
        places[name] = (at, n_bytes)
        if isinstance(bounce, HostBounce) and len(begins) > _MANY_RUNS:
            bounce.gather(offset, n_bytes, indices, at)
            at += len(seqs) * n_bytes
            continue
        for begin, end in zip(begins, ends, strict=True):
            if begin < end:
                bounce.copy(offset + int(indices[begin]) * n_bytes, (end - begin) * n_bytes, at + begin * n_bytes)
        at += len(seqs) * n_bytes
    bounce.finish()
    column = {name: bounce.memory[at : at + len(seqs) * n].reshape(len(seqs), n) for name, (at, n) in places.items()}
    link, record = column.get("link"), column.get("priority")
    priority = record.view(_PRIORITY).reshape(-1) if record is not None else None
    return CopiedRows(
        seqs,
        column["rows"],
        link.view(np.int64).reshape(-1) if link is not None else None,
        priority["priority"] if priority is not None else None,
        priority["lap"] if priority is not None else None,
        column.get("overlay"),
        overtaken,
        (grant.tail, grant.committed),
        ring,
    )
