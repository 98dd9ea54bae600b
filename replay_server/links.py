"""Chains of rows: for every row the ring index of its lane's next row, -1 where there is none (yet).

Links travel with their span: rows first, then the span's links, then the links that lead into it from the collector's previous span,
all on the one copy stream before the span's event. A window granted before that event never contains the span, and a reader treats
links to rows past its window as none, so a half-made chain is never seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

NO_LINK = -1


@dataclass(frozen=True, slots=True)
class LinkedSpan:
    """A span's links (ring indices, one a row) and its lanes' last rows (offset in the span, -1 for a lane without a row)."""

    first_seq: int
    links: Int64s
    last_offset: Int64s


@dataclass(frozen=True, slots=True)
class LinkRun:
    """Links to write at consecutive seqs from ``first_seq``."""

    first_seq: int
    links: Int64s


def link_span(first_seq: int, rows: int, lanes: int, lanes_of_rows: bytes, ring_rows: int) -> tuple[LinkedSpan, Int64s]:
    """Links inside a span, and for each lane the offset of its first row if a link may lead into it (else -1).

    ``lanes_of_rows``: one little-endian int32 a row, the lane or ``~lane`` where no link leads into the row; empty for whole steps over
    all lanes in order with nothing cut. Raises ValueError when it doesn't fit ``rows`` and ``lanes``.
    """
    offsets = np.arange(rows, dtype=np.int64)
    index = (first_seq + offsets) % ring_rows
    links = np.full(rows, NO_LINK, np.int64)
    if not lanes_of_rows:
        if rows % lanes:
            raise ValueError(f"{rows} rows are not whole steps of {lanes} lanes")
        links[: rows - lanes] = index[lanes:]
        every_lane = np.arange(lanes, dtype=np.int64)
        nothing = np.full(lanes, NO_LINK, np.int64)
        first, last = (every_lane, rows - lanes + every_lane) if rows else (nothing, nothing)
        return LinkedSpan(first_seq, links, last), first
    coded = np.frombuffer(lanes_of_rows, "<i4").astype(np.int64) if len(lanes_of_rows) == 4 * rows else np.empty(0, np.int64)
    is_cut = coded < 0
    lane = np.where(is_cut, ~coded, coded)
    if len(coded) != rows or (rows and lane.max() >= lanes):
        raise ValueError(f"lanes of rows: {rows} int32 below {lanes} are right")
    order = np.argsort(lane, kind="stable")
    follows = lane[order][1:] == lane[order][:-1]
    before, after = order[:-1][follows], order[1:][follows]
    links[before] = np.where(is_cut[after], NO_LINK, index[after])
    first, last = np.full(lanes, NO_LINK, np.int64), np.full(lanes, NO_LINK, np.int64)
    starts, ends = order[np.r_[True, ~follows]] if rows else order, order[np.r_[~follows, True]] if rows else order
    first[lane[starts]] = np.where(is_cut[starts], NO_LINK, starts)
    last[lane[ends]] = ends
    return LinkedSpan(first_seq, links, last), first


def complete(previous: LinkedSpan, span: LinkedSpan, first_offset: Int64s, ring_rows: int, oldest_owned_seq: int) -> LinkRun | None:
    """The previous span's links into ``span``, as one run of consecutive rows, or None when there are none.

    Rows between the predecessors are written again with what they hold. Rows before ``oldest_owned_seq`` (taken after ``span`` was
    reserved) belong to another span by now and are left out.
    """
    joined = (previous.last_offset >= 0) & (first_offset >= 0)
    if not joined.any():
        return None
    predecessors = previous.last_offset[joined]
    previous.links[predecessors] = (span.first_seq + first_offset[joined]) % ring_rows
    start = max(int(predecessors.min()), oldest_owned_seq - previous.first_seq)
    run = previous.links[start : int(predecessors.max()) + 1]
    return LinkRun(previous.first_seq + start, run) if len(run) else None
