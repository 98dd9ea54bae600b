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
    """A span's links (ring indices, one a row) and its lanes' last rows (offset in the span, -1 for a lane without a row).

    ``is_whole``: at least one step, all of them over all lanes in order, nothing cut.
    """

    first_seq: int
    links: Int64s
    last_offset: Int64s
    is_whole: bool


@dataclass(frozen=True, slots=True)
class LinkRun:
    """Links to write at consecutive seqs from ``first_seq``."""

    first_seq: int
    links: Int64s


def check_lanes(rows: int, lanes: int, lanes_of_rows: bytes) -> None:
    """Raises ValueError where ``link_span`` would."""
    if not lanes_of_rows:
        if rows % lanes:
            raise ValueError(f"{rows} rows are not whole steps of {lanes} lanes")
        return
    lane = _decode(lanes_of_rows)[0] if len(lanes_of_rows) == 4 * rows else None
    if lane is None or (rows and lane.max() >= lanes):
        raise ValueError(f"lanes of rows: {rows} int32 below {lanes} are right")


def link_span(first_seq: int, rows: int, lanes: int, lanes_of_rows: bytes, ring_rows: int) -> tuple[LinkedSpan, Int64s]:
    """Links inside a span, and for each lane the offset of its first row if a link may lead into it (else -1).

    ``lanes_of_rows``: one little-endian int32 a row, the lane or ``~lane`` where no link leads into the row; empty for whole steps over
    all lanes in order with nothing cut. Raises ValueError when it doesn't fit ``rows`` and ``lanes``.
    """
    check_lanes(rows, lanes, lanes_of_rows)
    index = _indices(first_seq, rows, ring_rows)
    links = np.full(rows, NO_LINK, np.int64)
    if not lanes_of_rows:
        links[: rows - lanes] = index[lanes:]
        every_lane = np.arange(lanes, dtype=np.int64)
        nothing = np.full(lanes, NO_LINK, np.int64)
        first, last = (every_lane, rows - lanes + every_lane) if rows else (nothing, nothing)
        return LinkedSpan(first_seq, links, last, rows > 0), first
    lane, is_cut = _decode(lanes_of_rows)
    order = np.argsort(lane, kind="stable")
    follows = lane[order][1:] == lane[order][:-1]
    before, after = order[:-1][follows], order[1:][follows]
    links[before] = np.where(is_cut[after], NO_LINK, index[after])
    first, last = np.full(lanes, NO_LINK, np.int64), np.full(lanes, NO_LINK, np.int64)
    starts, ends = order[np.r_[True, ~follows]] if rows else order, order[np.r_[~follows, True]] if rows else order
    first[lane[starts]] = np.where(is_cut[starts], NO_LINK, starts)
    last[lane[ends]] = ends
    return LinkedSpan(first_seq, links, last, False), first


def complete(previous: LinkedSpan, span: LinkedSpan, first_offset: Int64s, ring_rows: int, oldest_owned_seq: int) -> LinkRun | None:
    """The previous span's links into ``span``, as one run of consecutive rows, or None when there are none.

    Rows between the predecessors are written again with what they hold. Rows before ``oldest_owned_seq`` (taken after ``span`` was
    reserved) belong to another span by now and are left out.
    """
    oldest_offset = oldest_owned_seq - previous.first_seq
    if previous.is_whole and span.is_whole:  # of thousands of lanes, at every step
        lanes, end = len(first_offset), len(previous.links)
        previous.links[-lanes:] = _indices(span.first_seq, lanes, ring_rows)
        start = max(end - lanes, oldest_offset)
    else:
        joined = (previous.last_offset >= 0) & (first_offset >= 0)
        if not joined.any():
            return None
        predecessors = previous.last_offset[joined]
        previous.links[predecessors] = (span.first_seq + first_offset[joined]) % ring_rows
        start, end = max(int(predecessors.min()), oldest_offset), int(predecessors.max()) + 1
    run = previous.links[start:end]
    return LinkRun(previous.first_seq + start, run) if len(run) else None


def _decode(lanes_of_rows: bytes) -> tuple[Int64s, npt.NDArray[np.bool_]]:
    """The lane of each row, and whether no link leads into it."""
    coded = np.frombuffer(lanes_of_rows, "<i4").astype(np.int64)
    is_cut = coded < 0
    return np.where(is_cut, ~coded, coded), is_cut


def _indices(first_seq: int, rows: int, ring_rows: int) -> Int64s:
    """Ring indices of consecutive rows, at most ``ring_rows``; without a division for each."""
    first = first_seq % ring_rows
    indices = np.arange(first, first + rows, dtype=np.int64)
    indices[ring_rows - first :] -= ring_rows
    return indices
