"""What adds up along each lane while rows are handed over: the running discounted return, and episodes' returns and lengths.

```
lane 0   r r r E r r    E: terminated or truncated      pieces of lane 0: [r r r E] ended, [r r] open, goes on in the next slot
lane 1   r r ~ r E r    ~: no link leads into the row   pieces of lane 1: [r r] lost, [~ r E] its start is unknown, [r] open
```
An episode counts when its start is known: a lane's first row, the row after an ended one, or one of role ``first``. What is cut, or loses
a row, doesn't. Rows are laid out lane by lane in numpy; nothing here runs once a row, some things once an episode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from replay_server_protocol.episodes import pack_episodes
from replay_server_protocol.moments import Moments, pack_scalars
from replay_server_protocol.schema import PlacedField, Schema

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FEW_STEPS = 4
"""Up to so many, a loop over steps costs less than laying rows out by lanes."""
_NO_RETURNS = Moments.empty(1).pack()


@dataclass(frozen=True, slots=True)
class LaneFields:
    """The fields that a sum along lanes needs; each holds one value a row."""

    reward: PlacedField
    ends: tuple[PlacedField, ...]
    first: PlacedField | None

    @classmethod
    def of(cls, schema: Schema) -> LaneFields | None:
        """None if no field has the role reward, or it is no single number a row."""
        found = {role: schema[name] for role, name in schema.roles.items() if schema[name].elements == 1}
        reward = found.get("reward")
        if reward is None or reward.dtype == "bool":
            return None
        return cls(reward, tuple(found[role] for role in ("terminated", "truncated") if role in found), found.get("first"))


@dataclass(frozen=True, slots=True)
class Laid:
    """Rows lane by lane: ``order`` (their places in time), where each lane's rows begin, which lanes they are, and where a cut is."""

    order: Ints
    heads: Ints
    lanes: Ints
    is_cut: Bools | None

    @classmethod
    def plain(cls, rows: int, lanes: int) -> Laid:
        """Whole steps over all lanes in order."""
        steps = rows // lanes
        return cls(np.arange(rows).reshape(steps, lanes).T.ravel(), np.arange(0, rows, steps), np.arange(lanes), None)

    @classmethod
    def marked(cls, lane_of: npt.NDArray[np.int32]) -> Laid:
        """``lane_of``: each row's lane, ~lane at a cut."""
        lane = np.where(lane_of < 0, ~lane_of, lane_of)
        order = np.argsort(lane, kind="stable")
        lane = lane[order]
        heads = np.append(0, np.flatnonzero(lane[1:] != lane[:-1]) + 1)
        return cls(order, heads, lane[heads].astype(np.int64), lane_of[order] < 0)


class LaneSums:
    """The sums of one session's lanes. ``gamma`` is the return's discount, None if nobody asks for it; episodes need a field that ends."""

    def __init__(self, fields: LaneFields, lanes: int, gamma: float | None) -> None:
        self.fields = fields
        self._lanes = lanes
        self._gamma = gamma
        self._return: Floats = np.zeros(lanes)
        self._total: Floats = np.zeros(lanes)
        self._rows: Ints = np.zeros(lanes, np.int64)
        self._is_whole: Bools = np.ones(lanes, np.bool_)
        self._plain = Laid.plain(lanes, lanes)

    def take(
        self, rewards: Floats, ends: Bools, firsts: Bools | None, lane_of: npt.NDArray[np.int32] | None, *, are_tame: bool = False
    ) -> tuple[bytes, bytes]:
        """The next n >= 1 rows: packed moments of their returns, and the episodes that ended in them. ``lane_of`` None: plain steps.

        ``are_tame``: the rewards are known to be finite, and no sum of theirs is beyond float64.
        """
        if are_tame:
            return self._take(rewards, ends, firsts, lane_of, None)
        finite = np.isfinite(rewards)
        with np.errstate(over="ignore", invalid="ignore"):
            return self._take(rewards, ends, firsts, lane_of, None if finite.all() else ~finite)

    def _take(
        self, rewards: Floats, ends: Bools, firsts: Bools | None, lane_of: npt.NDArray[np.int32] | None, lost: Bools | None
    ) -> tuple[bytes, bytes]:
        if lane_of is None and firsts is None and lost is None:
            steps = len(rewards) // self._lanes
            if steps <= _FEW_STEPS or (self._gamma is None and not ends.any()):
                return self._take_steps(rewards.reshape(steps, -1), ends.reshape(steps, -1))
        laid = self._lay(len(rewards)) if lane_of is None else Laid.marked(lane_of)
        rewards, ends = rewards[laid.order], ends[laid.order]
        if lost is not None:
            lost = lost[laid.order]
            rewards[lost] = 0.0
        is_first = np.zeros(len(rewards), np.bool_) if firsts is None else firsts[laid.order]
        is_torn = np.zeros(len(rewards), np.bool_) if laid.is_cut is None else laid.is_cut & ~is_first  # the start is unknown
        if lost is not None:
            is_torn |= lost
        is_fresh = is_first | is_torn  # nothing of the lane before goes on here
        begins = is_fresh.copy()
        begins[1:] |= ends[:-1]
        begins[laid.heads] = True
        returns = self._returns(rewards, ends, begins, is_fresh, lost, laid) if self._gamma is not None else b""
        episodes = self._episodes(rewards, ends, begins, is_fresh, is_torn, laid) if self.fields.ends else b""
        return returns, episodes

    def _take_steps(self, rewards: Floats, ends: Bools) -> tuple[bytes, bytes]:
        """The same where all lanes go on, step by step: for many lanes and few steps, or for steps that end nothing."""
        if len(rewards) > 1 and self._gamma is None and not ends.any():
            self._total += rewards.sum(0)
            self._rows += len(rewards)
            return b"", b""
        returns, ended = [], list[tuple[float, int]]()
        for reward, end in zip(rewards, ends, strict=True):
            self._total += reward
            self._rows += 1
            (over,) = end.nonzero()
            if self._gamma is not None:
                self._return = self._gamma * self._return + reward
                returns.append(self._return.copy())
                self._return[over] = 0.0
            if len(over):
                ended += self._take_ended(over)
        episodes = pack_episodes(ended)
        if not returns:
            return b"", episodes
        moments = pack_scalars(np.concatenate(returns))
        if moments is None:
            self._return[~np.isfinite(self._return)] = 0.0
        return moments or _NO_RETURNS, episodes

    def _take_ended(self, lanes: Ints) -> list[tuple[float, int]]:
        """Return and length of the episodes that end in these lanes, as far as they count; the lanes begin anew."""
        parts = (self._total[lanes].tolist(), self._rows[lanes].tolist(), self._is_whole[lanes].tolist())
        self._total[lanes], self._rows[lanes], self._is_whole[lanes] = 0.0, 0, True
        return [(total, rows) for total, rows, is_whole in zip(*parts, strict=True) if is_whole and math.isfinite(total)]

    def _lay(self, rows: int) -> Laid:
        if len(self._plain.order) != rows:
            self._plain = Laid.plain(rows, self._lanes)
        return self._plain

    def _returns(self, rewards: Floats, ends: Bools, begins: Bools, is_fresh: Bools, lost: Bools | None, laid: Laid) -> bytes:
        """G = gamma G + reward along each lane, by doubling: after pass k every row holds the sum over the 2**k rows before it."""
        assert self._gamma is not None
        heads, lanes, n = laid.heads, laid.lanes, len(rewards)
        total = rewards.copy()
        total[heads] += np.where(is_fresh[heads], 0.0, self._gamma * self._return[lanes])
        weight = np.where(begins, 0.0, self._gamma)
        longest = int(np.diff(laid.heads, append=n).max())
        distance = 1
        while distance < longest:
            total[distance:] += weight[distance:] * total[:-distance]
            distance *= 2
            if distance < longest:
                half = distance // 2
                weight[half:] *= weight[:-half]
        last = np.append(heads[1:], n) - 1
        self._return[lanes] = np.where(ends[last] | ~np.isfinite(total[last]), 0.0, total[last])
        if lost is not None:
            total = total[~lost]
        return (pack_scalars(total) if len(total) else None) or _NO_RETURNS

    def _episodes(self, rewards: Floats, ends: Bools, begins: Bools, is_fresh: Bools, is_torn: Bools, laid: Laid) -> bytes:
        starts = np.flatnonzero(begins)
        stops = np.append(starts[1:], len(rewards))
        totals, rows, is_whole = np.add.reduceat(rewards, starts), stops - starts, ~is_torn[starts]
        lanes, firsts = laid.lanes, np.searchsorted(starts, laid.heads)
        goes_on = ~is_fresh[laid.heads]
        totals[firsts] += np.where(goes_on, self._total[lanes], 0.0)
        rows[firsts] += np.where(goes_on, self._rows[lanes], 0)
        is_whole[firsts] &= np.where(goes_on, self._is_whole[lanes], True)
        has_ended = ends[stops - 1]
        last = np.append(firsts[1:], len(starts)) - 1
        is_over = has_ended[last]
        self._total[lanes] = np.where(is_over, 0.0, totals[last])
        self._rows[lanes] = np.where(is_over, 0, rows[last])
        self._is_whole[lanes] = is_over | is_whole[last]
        counted = np.flatnonzero(has_ended & is_whole & np.isfinite(totals))
        if not len(counted):
            return b""
        counted = counted[np.argsort(laid.order[stops[counted] - 1])]
        return pack_episodes(list(zip(totals[counted].tolist(), rows[counted].tolist(), strict=True)))
