"""Which rows of the window make up the episode of one of them: found along the links, in the rows' own order."""

from __future__ import annotations

import numpy as np
from replay_server_protocol.errors import InvalidRequest

from replay_server_client.deadline import Deadline
from replay_server_client.look import LeaseSource, Seqs, chunks

_ENDS = ("terminated", "truncated")


def episode_seqs(source: LeaseSource, seq: int, bounds: tuple[int, int], deadline: Deadline) -> Seqs:
    """The seqs of the episode of ``seq``, oldest first, as far as they are in the window and no cut separates them.

    One look at the whole window: for one pair of eyes, not for a training loop. Raises InvalidRequest when the server keeps no links.
    """
    ring = source.ring(deadline)
    if ring.at.link_offset is None:
        raise InvalidRequest("episode_of follows links, which this server does not keep; serve with --columns link")
    ends = [ring.schema[ring.schema.roles[role]] for role in _ENDS if role in ring.schema.roles]
    if not ends:
        raise InvalidRequest(f"episode_of needs a field with the role {' or '.join(_ENDS)}: name it in Schema.of(..., roles={{...}})")
    tail, committed = bounds
    size, ring_rows = committed - tail, ring.at.ring_rows
    after, is_end = np.full(size, -1, np.int64), np.zeros(size, bool)  # by place in the window
    for chunk in chunks(source, np.arange(tail, committed), deadline):
        assert chunk.link is not None
        here = chunk.seqs - tail
        next_seq = chunk.seqs + (chunk.link - chunk.seqs % ring_rows) % ring_rows
        is_link = (chunk.link >= 0) & (chunk.link < ring_rows) & (next_seq < committed) & (next_seq > chunk.seqs)
        after[here] = np.where(is_link, next_seq - tail, -1)
        for field in ends:
            is_end[here] |= field.view(chunk.rows).reshape(len(here), -1).any(1)
    before = np.full(size, -1, np.int64)
    linked = np.flatnonzero((after >= 0) & ~is_end)  # an episode ends with its row, whatever its lane does next
    before[after[linked]] = linked
    return tail + np.array([*_walk(before, seq - tail)[:0:-1], *_walk(np.where(is_end, -1, after), seq - tail)], np.int64)


def _walk(links: Seqs, place: int) -> list[int]:
    """``place`` and all that follow it."""
    found = [place]
    while (place := int(links[place])) >= 0:
        found.append(place)
    return found
