"""What the lanes of real collectors wrote, as a plain list of rows: the slow reference of everything that follows links."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from replay_server_client import Batch, Collector, Schema
from support.streams import Row

LANES = Schema.of(seq="int64", obs=("float32", 3), reward="float32", next_obs=("float32", 3), terminated="bool", truncated="bool")
"""obs is (lane, episode, t), next_obs the same for t + 1: an episode's last one is its final observation, never the reset's."""

GAMMA = 0.5
"""With small whole rewards every sum is exact."""


class _Writer:
    def __init__(self, collector: Collector, first_lane: int) -> None:
        self.collector = collector
        self.lanes = range(first_lane, first_lane + collector.lanes)
        self.at = dict.fromkeys(self.lanes, (0, 0))  # episode and t of the next row
        self.last_in_span: dict[int, Row] = {}
        self.is_cut: set[int] = set()


class Lanes:
    """``write`` adds a random chunk; ``rows[seq]`` is every row ever written.

    A chunk goes out as spans that this class knows, since a lane without a row in a span is cut: whole steps, or one slot with a mask.
    """

    def __init__(self, collectors: Iterable[Collector], slot_rows: int, rng: random.Random) -> None:
        self.rows: list[Row] = []
        self._slot_rows = slot_rows
        self._rng = rng
        self._writers = [_Writer(collector, 100 * number) for number, collector in enumerate(collectors)]

    def write(self, p_end: float = 0.15) -> int:
        """Some steps of one collector, flushed; returns ``committed``."""
        rng, writer = self._rng, self._rng.choice(self._writers)
        lanes = len(writer.lanes)
        most, is_plain = self._slot_rows // lanes, rng.random() < 0.5
        steps = rng.randint(1, 2 * most + 1 if is_plain else most)
        kept = np.array([is_plain or rng.random() < 0.7 for _ in range(steps * lanes)])
        kept[rng.randrange(len(kept))] = True
        if rng.random() < 0.3:
            cut = rng.randrange(lanes)
            writer.collector.cut(cut)
            writer.is_cut.add(writer.lanes[cut])
        now: dict[int, Row] = {}
        written = [self._step(writer, lane, now, p_end) if keep else None for keep, lane in zip(kept, [*writer.lanes] * steps, strict=True)]
        writer.last_in_span = now
        arrays, final = _arrays(written)
        mask = None if is_plain else kept
        writer.collector.write(arrays, mask=mask, final_mask=np.array([r is not None and r.has_ended for r in written]), final=final)
        committed = writer.collector.flush()
        assert committed == len(self.rows)
        return committed

    def chain(self, seq: int, committed: int, rows: int, *, crosses: bool = False) -> list[Row]:
        """At most ``rows`` rows of the lane from ``seq``: the obvious way."""
        chain = [self.rows[seq]]
        while len(chain) < rows and (crosses or not chain[-1].has_ended):
            following = chain[-1].following
            if following is None or following >= committed:
                break
            chain.append(self.rows[following])
        return chain

    def _step(self, writer: _Writer, lane: int, now: dict[int, Row], p_end: float) -> Row:
        (episode, t), ends = writer.at[lane], self._rng.random() < p_end
        is_terminated = ends and self._rng.random() < 0.5
        row = Row(len(self.rows), lane, episode, t, self._rng.randint(-8, 8), is_terminated, ends and not is_terminated, t == 0)
        writer.at[lane] = (episode + 1, 0) if ends else (episode, t + 1)
        before = now.get(lane, writer.last_in_span.get(lane))
        if before is not None and lane not in writer.is_cut:
            before.following = row.seq
        writer.is_cut.discard(lane)
        now[lane] = row
        self.rows.append(row)
        return row


def check_n_step(lanes: Lanes, batch: Batch, n_step: int) -> None:
    """Every row against the reference, with ``reward + bootstrap * q(next_obs)`` for a q of ours."""
    committed = batch.window[1]
    columns = [batch["obs"], batch["next_obs"], batch["reward"], batch["terminated"], batch["truncated"]]
    columns += [batch.n_steps, batch.discount, batch.bootstrap, batch["seq"]]
    q = torch.tensor([0.25, 3.0, 1.0])
    target = batch["reward"].cpu() + batch.bootstrap.cpu() * (batch["next_obs"].cpu() @ q)
    found = zip(batch.seqs.tolist(), *(column.tolist() for column in columns), target.tolist(), strict=True)
    for seq, obs, next_obs, reward, terminated, truncated, steps, discount, bootstrap, own_seq, y in found:
        used = lanes.chain(seq, committed, n_step)
        first, last = used[0], used[-1]
        total = sum(GAMMA**k * row.reward for k, row in enumerate(used))
        after = [last.lane, last.episode, last.t + 1]
        assert (own_seq, obs) == (seq, [first.lane, first.episode, first.t])
        assert (reward, next_obs) == (total, after)
        assert (terminated, truncated) == (last.is_terminated, last.is_truncated)
        lives = 0.0 if last.is_terminated else GAMMA ** len(used)
        assert (steps, discount, bootstrap) == (len(used), GAMMA ** len(used), lives)
        assert y == pytest.approx(total + lives * float(torch.tensor(after).float() @ q))


def check_sequences(lanes: Lanes, batch: Batch, length: int, stride: int, burn_in: int, *, crosses: bool) -> None:
    committed = batch.window[1]
    assert batch["obs"].shape == (len(batch), length, 3)
    assert batch["reward"].shape == batch.seqs.shape == batch.mask.shape == (len(batch), length)
    assert torch.equal(batch["seq"], batch.seqs)
    assert batch.compact("obs").is_contiguous()
    assert torch.equal(batch.span("terminated", "truncated"), torch.stack([batch["terminated"], batch["truncated"]], 2))
    parts = (batch.seqs, batch.mask, batch.is_first, batch.loss_mask, batch["obs"])
    for seqs, mask, is_first, loss_mask, obs in zip(*(part.tolist() for part in parts), strict=True):
        lane = lanes.chain(seqs[0], committed, (length - 1) * stride + 1, crosses=crosses)
        kept = lane[::stride]
        missing = length - len(kept)
        assert seqs == [row.seq for row in kept] + [kept[-1].seq] * missing
        assert mask == [True] * len(kept) + [False] * missing
        assert loss_mask == [there and step >= burn_in for step, there in enumerate(mask)]
        begins = [step == 0 or any(row.has_ended for row in lane[(step - 1) * stride : step * stride]) for step in range(len(kept))]
        assert is_first == begins + [False] * missing
        assert obs == [[row.lane, row.episode, row.t] for row in [*kept, *[kept[-1]] * missing]]


def _arrays(rows: list[Row | None]) -> tuple[dict[str, npt.NDArray[np.generic]], dict[str, npt.NDArray[np.generic]]]:
    """What is given to ``write``, and the final values; rows that are masked out hold -1."""
    n = len(rows)
    ints, flags = np.full((2, n), -1), np.ones((2, n), np.bool_)
    obs, after, last = np.full((3, n, 3), -1, np.float32)
    for i, row in enumerate(rows):
        if row is not None:
            ints[:, i], flags[:, i] = (row.seq, row.reward), (row.is_terminated, row.is_truncated)
            obs[i], last[i] = (row.lane, row.episode, row.t), (row.lane, row.episode, row.t + 1)
            after[i] = (row.lane, row.episode + 1, 0) if row.has_ended else last[i]
    rest = {"reward": ints[1].astype(np.float32), "next_obs": after, "terminated": flags[0], "truncated": flags[1]}
    return {"seq": ints[0], "obs": obs, **rest}, {"next_obs": last}
