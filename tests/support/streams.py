"""What random collectors write, twice: as ring and link column, made by the server's own link functions, and as a plain list of rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from replay_server_protocol.schema import PlacedField, Schema
from torch import Tensor

from replay_server.links import LinkedSpan, complete, link_span

GARBAGE_LINKS = (-1, 0, 3, -2, 2**31, 2**62, -(2**63), 0xFFFFFFFF, -(2**32) + 5)


@dataclass(slots=True)
class Row:
    """One row as its collector knows it. ``following`` is the seq of its lane's next row, None at a cut and before there is one."""

    seq: int
    lane: int
    episode: int
    t: int
    reward: int
    is_terminated: bool
    is_truncated: bool
    is_first: bool
    following: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.is_terminated or self.is_truncated


class _Lane:
    def __init__(self, number: int) -> None:
        self.number, self.episode, self.t = number, 0, 0
        self.is_starting = True

    def step(self, rng: random.Random, seq: int, p_end: float, has_truncated: bool) -> Row:
        ends = rng.random() < p_end
        is_terminated = ends and (not has_truncated or rng.random() < 0.5)
        is_first, self.is_starting = self.is_starting, ends
        row = Row(seq, self.number, self.episode, self.t, rng.randint(-8, 8), is_terminated, ends and not is_terminated, is_first)
        self.episode, self.t = (self.episode + 1, 0) if ends else (self.episode, self.t + 1)
        return row


class _Collector:
    def __init__(self, first_lane: int, lanes: int) -> None:
        self.lanes = [_Lane(first_lane + lane) for lane in range(lanes)]
        self.last_in_span: dict[int, Row] = {}
        self.previous: LinkedSpan | None = None


class Stream:
    """``ring`` (uint8[ring_rows, stride]) and ``link`` (int64[ring_rows]) after every ``write``; ``rows[seq]`` is every row ever written.

    Fields are filled by role; obs is (lane, episode, t), next_obs the same for t + 1, whatever the next row is; the bytes of padding are
    random. With one collector of one lane, no masks and no cuts, ``p_end`` alone makes episodes.
    """

    def __init__(self, schema: Schema, capacity: int, slot_rows: int, rng: random.Random, lanes: tuple[int, ...] = (1,)) -> None:
        self.schema, self.capacity, self.slot_rows = schema, capacity, slot_rows
        self.ring_rows = capacity + 2 * slot_rows
        self.rows: list[Row] = []
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.ring = torch.randint(0, 256, (self.ring_rows, schema.stride), dtype=torch.uint8, generator=generator)
        self.link = torch.full((self.ring_rows,), 1, dtype=torch.int64)
        self._rng = rng
        self._collectors = [_Collector(100 * number, count) for number, count in enumerate(lanes)]

    @property
    def reserved(self) -> int:
        return len(self.rows)

    def write(self, steps: int | None = None, *, is_plain: bool = False, p_end: float = 0.15) -> None:
        """A span of one collector: whole plain steps, or masked ones with cuts."""
        rng, collector = self._rng, self._rng.choice(self._collectors)
        lanes = len(collector.lanes)
        steps = steps or rng.randint(1, max(1, self.slot_rows // lanes))
        plain = is_plain or rng.random() < 0.4
        placed = [
            (lane, not plain and rng.random() < 0.12) for _ in range(steps) for lane in range(lanes) if plain or rng.random() < 0.75
        ] or [(rng.randrange(lanes), False)]
        first_seq = self.reserved
        now: dict[int, Row] = {}
        for lane, is_cut in placed:
            if is_cut:
                collector.lanes[lane].t += 10  # rows were lost
            row = collector.lanes[lane].step(rng, self.reserved, p_end, "truncated" in self.schema.roles)
            before = now.get(lane, collector.last_in_span.get(lane))
            if before is not None and not is_cut:
                before.following = row.seq
            now[lane] = row
            self.rows.append(row)
            self._store(row)
        collector.last_in_span = now
        coded = b"" if plain else np.array([~lane if is_cut else lane for lane, is_cut in placed], "<i4").tobytes()
        self._store_links(collector, first_seq, coded)

    def windows(self) -> Iterator[range]:
        """Every window that may be granted while what was written last is in the ring, though not yet committed."""
        oldest = max(0, self.reserved - self.ring_rows)
        for committed in range(max(1, oldest + 1, self.reserved - self.slot_rows), self.reserved + 1):
            yield range(max(oldest, committed - self.capacity), committed)

    def with_garbage_outside(self, window: range) -> tuple[Tensor, Tensor]:
        """Copies of ring and link with every row outside ``window`` torn: all bits set (NaN, True), links anywhere."""
        ring, link = self.ring.clone(), self.link.clone()
        inside = {seq % self.ring_rows for seq in window}
        for index in set(range(self.ring_rows)) - inside:
            ring[index] = 255
            link[index] = self._rng.choice(GARBAGE_LINKS)
        return ring, link

    def chain(self, seq: int, committed: int, rows: int, *, crosses: bool = False) -> list[Row]:
        """At most ``rows`` rows of the lane from ``seq``: the obvious way."""
        chain = [self.rows[seq]]
        while len(chain) < rows and (crosses or not chain[-1].has_ended):
            following = chain[-1].following
            if following is None or following >= committed:
                break
            chain.append(self.rows[following])
        return chain

    def _store(self, row: Row) -> None:
        values: dict[str, object] = {
            "obs": (row.lane, row.episode, row.t),
            "next_obs": (row.lane, row.episode, row.t + 1),
            "seq": row.seq,
        }
        roles = {"reward": row.reward, "terminated": row.is_terminated, "truncated": row.is_truncated, "first": row.is_first}
        values |= {self.schema.roles[role]: value for role, value in roles.items() if role in self.schema.roles}
        target = self.ring[row.seq % self.ring_rows]
        for field in self.schema:
            value = torch.tensor(values.get(field.name, row.seq % 120))
            if field.name == self.schema.roles.get("reward"):
                value = value + torch.arange(field.elements)
            view_of(target[None], field)[0] = value.to(getattr(torch, field.dtype))

    def _store_links(self, collector: _Collector, first_seq: int, coded: bytes) -> None:
        rows = self.reserved - first_seq
        linked, first_offset = link_span(first_seq, rows, len(collector.lanes), coded, self.ring_rows)
        self._write_links(first_seq, linked.links)
        if collector.previous is not None:
            run = complete(collector.previous, linked, first_offset, self.ring_rows, self.reserved - self.ring_rows)
            if run is not None:
                self._write_links(run.first_seq, run.links)
        collector.previous = linked

    def _write_links(self, first_seq: int, links: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        for seq, link in enumerate(links.tolist(), first_seq):
            self.link[seq % self.ring_rows] = link


def view_of(rows: Tensor, field: PlacedField) -> Tensor:
    """A field of ``uint8[n, stride]`` rows: ``dtype[n, elements]``."""
    dtype: torch.dtype = getattr(torch, field.dtype)
    return rows[:, field.offset : field.end].view(dtype)


def random_stream(seed: int, schema: Schema, *, has_big_slots: bool = True) -> Stream:
    """One to three collectors with one to four lanes each, about three times round the ring."""
    rng = random.Random(seed)
    lanes = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
    stream = Stream(schema, rng.randint(6, 40), rng.randint(4, 12) if has_big_slots else max(lanes), rng, lanes)
    p_end = rng.choice((0.0, 0.05, 0.2, 0.5, 1.0))
    while stream.reserved < 3 * stream.ring_rows:
        stream.write(p_end=p_end)
    return stream
