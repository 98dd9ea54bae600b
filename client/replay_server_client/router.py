"""How many rows of a batch come from which shard. A shard is one server's ring; the router asks nobody, it is told and it draws.

```
report(shard, generation, size_rows, mass) ──►┐
                                              ├─► taking part, epoch ──► draw(n) ──► Counts ──► k_i rows asked of shard i
lose(shard) ─────────────────────────────────►┘                            redraw(counts, lost) ◄── it died before it answered
```

**Modes.** ``global``: k ~ Multinomial(n, n_i / Σn), so that each of the n draws is any row of the union with probability 1 / Σn, exactly,
if ``size_rows`` are the sizes that the shards draw from. Where they are those of a moment before, while shards fill, the error in total
variation is at most ½ Σ |n_i / Σn - n'_i / Σn'|. ``stratified``: k_i = n n_i / Σn rounded by largest remainder: the same k_i each time,
less variance; a row's probability is off by less than 1 / (n n_i). ``local``: all rows from ``own``. Beside averaged gradients that is
equal weight for each shard, however many rows it has: biased where they differ.

With ``by_mass`` the priority masses S_i stand in the place of n_i. A row of priority p (``value ** alpha``) then has probability p / ΣS;
its importance weight is (N p / ΣS)^-β with N and ΣS over all shards, divided by the largest such weight, that of the smallest positive
priority in any shard: (p_least / p)^β (``importance_weights``).

**Membership.** A shard takes part while it is up with at least ``floor_rows`` rows, and one at least. ``epoch`` moves on whenever a shard
begins or ceases to take part, and when one does with another generation. A lost shard has no rows from the next draw on; it joins again
with rows above its floor, in the generation it had or another one: where a clock was set back, a later life has the lower number. Reports
of a generation that it has left are refused (False) and change nothing.
Sampling may begin (``missing`` is empty) once every shard that was never lost takes part and all that do hold ``min_size`` rows together.

**Loss.** ``on_loss="redraw"``: ``redraw`` gives what a lost shard was to give to the rest, in their proportion; for ``global`` the batch is
then distributed as if the shard had not been there. ``on_loss="raise"``: draws raise ShardLost until it has joined again.

**Ids** of rows are (shard, generation, index, seq): ``ID_COLUMNS`` of an int64 array, the shard as its place in ``shards``. ``groups``
splits such ids by shard and leaves out those of another generation than the present one, or of a lost shard.

Pure: numpy only, one thread at a time. Equal seeds and equal calls give equal counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from replay_server_protocol.errors import InvalidRequest, ShardLost, shown

Mode = Literal["global", "stratified", "local"]
OnLoss = Literal["redraw", "raise"]
Ints = npt.NDArray[np.int64]

_LEFT_KEPT = 16
ID_COLUMNS = ("shard", "generation", "index", "seq")


@dataclass(frozen=True, slots=True)
class Counts:
    """``rows[i]`` rows are to come from shard i of ``generations[i]``; drawn in ``epoch`` from shards of ``sizes`` rows, 0 of those that
    take no part."""

    epoch: int
    rows: tuple[int, ...]
    generations: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def n(self) -> int:
        return sum(self.rows)


class Groups(NamedTuple):
    """For each shard the places of its rows among the ids given, and how many of all ids are stale."""

    places: tuple[Ints, ...]
    stale: int


@dataclass(slots=True)
class Shard:
    """What was told of one shard last. ``mass`` is the sum of its priorities, ``least`` the smallest positive one; inf if there is none."""

    name: str
    floor_rows: int
    generation: int = 0
    size_rows: int = 0
    mass: float = 0.0
    least: float = math.inf
    is_up: bool = False
    was_lost: bool = False
    left: tuple[int, ...] = ()
    """Generations it had before, the last ones."""

    @property
    def takes_part(self) -> bool:
        return self.is_up and self.size_rows >= max(1, self.floor_rows)


class Router:
    """Knows the shards by name and draws the counts. ``epoch`` counts changes of membership, from 0."""

    def __init__(
        self,
        shards: Sequence[str],
        *,
        mode: Mode = "global",
        seed: int = 0,
        own: str | None = None,
        min_size: int = 1,
        floor_rows: int | Sequence[int] = 1,
        on_loss: OnLoss = "redraw",
    ) -> None:
        """``own`` is the shard of mode local. ``floor_rows``: one for all, or one each. Raises InvalidRequest naming the argument."""
        names = tuple(shards)
        if not names or len(set(names)) != len(names) or not all(isinstance(name, str) for name in names):
            raise InvalidRequest(f"shards={shown(names)}: one or more different names")
        if mode not in get_args(Mode) or on_loss not in get_args(OnLoss):
            raise InvalidRequest(f"mode={shown(mode)}, on_loss={shown(on_loss)}: one of {get_args(Mode)}, one of {get_args(OnLoss)}")
        if (own in names) is not (mode == "local") or (own is not None and mode != "local"):
            raise InvalidRequest(f"own={shown(own)}: the name of a shard where mode is 'local', else None")
        floors = [floor_rows] * len(names) if isinstance(floor_rows, int) else list(floor_rows)
        if len(floors) != len(names) or not all(type(rows) is int and rows >= 0 for rows in (*floors, min_size)):
            raise InvalidRequest(f"floor_rows={shown(floor_rows)}, min_size={shown(min_size)}: at least 0, one floor or one each")
        if not isinstance(seed, int):
            raise InvalidRequest(f"seed={shown(seed)}: an integer")
        self.shards = names
        self.mode, self.on_loss, self.min_size = mode, on_loss, min_size
        self.epoch = 0
        self._own = own
        self._shards = [Shard(name, floor) for name, floor in zip(names, floors, strict=True)]
        self._place_of = {name: place for place, name in enumerate(names)}
        self._membership: tuple[tuple[str, int], ...] = ()
        self._generator = np.random.default_rng(seed % 2**64)

    def report(self, shard: str, *, generation: int, size_rows: int, mass: float | None = None, least: float | None = None) -> bool:
        """Tells what ``shard`` holds now. False, and nothing has changed, if it has left that generation."""
        known = self._shard(shard)
        if generation in known.left:
            return False
        before = known.generation, known.takes_part
        if generation != known.generation:
            known.mass, known.least, known.left = 0.0, math.inf, (*known.left, known.generation)[-_LEFT_KEPT:]
        known.generation, known.size_rows, known.is_up = generation, size_rows, True
        if mass is not None:
            known.mass = mass
        if least is not None:
            known.least = least
        if (known.generation, known.takes_part) != before:  # looking at every shard for every shard's report would cost S² a batch
            self._note_membership()
        return True

    def lose(self, shard: str) -> None:
        """``shard`` is gone with all its rows. Safe to tell twice."""
        known = self._shard(shard)
        known.was_lost = known.was_lost or known.is_up
        known.is_up, known.size_rows, known.mass, known.least = False, 0, 0.0, math.inf
        self._note_membership()

    def state(self, shard: str) -> Shard:
        """What is known of it; not to be changed."""
        return self._shard(shard)

    @property
    def taking_part(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._membership)

    @property
    def size_rows(self) -> int:
        """N: rows of all shards that take part."""
        return sum(shard.size_rows for shard in self._shards if shard.takes_part)

    @property
    def mass(self) -> float:
        """ΣS: priorities of all shards that take part."""
        return sum(shard.mass for shard in self._shards if shard.takes_part)

    @property
    def least(self) -> float:
        """The smallest positive priority of any shard that takes part; inf where there is none."""
        return min((shard.least for shard in self._shards if shard.takes_part), default=math.inf)

    def missing(self) -> str:
        """Why sampling can't begin yet, for the text of an error; empty when it can."""
        awaited = [shard for shard in self._concerned() if not shard.takes_part and not shard.was_lost]
        if awaited:
            told = (f"{s.name!r} has {s.size_rows:,}" if s.is_up else f"{s.name!r} has not answered" for s in awaited)
            return f"each shard needs its floor_rows ({', '.join(f'{s.floor_rows:,}' for s in awaited)}): {', '.join(told)}"
        have = sum(shard.size_rows for shard in self._concerned() if shard.takes_part)
        return "" if have >= max(1, self.min_size) else f"need {max(1, self.min_size):,} rows over all shards, have {have:,}"

    def draw(self, n: int, *, by_mass: bool = False) -> Counts:
        """How many of ``n`` rows come from each shard. ``by_mass``: by priority masses; by sizes where all masses are 0.

        Raises ShardLost where a loss is to be raised, and where no shard is left.
        """
        lost = [shard.name for shard in self._concerned() if shard.was_lost and not shard.takes_part]
        if lost and self.on_loss == "raise":
            raise ShardLost(f"shard {lost[0]!r} is lost: start it again, or sample with on_loss='redraw'", shard=lost[0])
        return self._counts(self._split(n, by_mass))

    def redraw(self, counts: Counts, lost: Sequence[str], *, by_mass: bool = False) -> Counts:
        """``counts`` without the ``lost`` shards, whose rows come from the rest. Tells the router of the loss. Raises as ``draw``."""
        for shard in lost:
            self.lose(shard)
        places = {self._place_of[shard] for shard in lost}
        missing = sum(counts.rows[place] for place in places)
        if self.on_loss == "raise":
            self.draw(0)
        more = self._split(missing, by_mass) if missing else [0] * len(self._shards)
        kept = (0 if place in places else rows for place, rows in enumerate(counts.rows))
        return self._counts([old + new for old, new in zip(kept, more, strict=True)])

    def groups(self, ids: Ints) -> Groups:
        """Splits ids (``int64[n, 4]``, ID_COLUMNS) by shard; stale ones are left out and counted."""
        present = np.array([shard.generation if shard.is_up else -1 for shard in self._shards], np.int64)
        is_known = (ids[:, 0] >= 0) & (ids[:, 0] < len(present))
        is_fresh = is_known & (present[np.where(is_known, ids[:, 0], 0)] == ids[:, 1])
        places = tuple(np.flatnonzero(is_fresh & (ids[:, 0] == place)) for place in range(len(present)))
        return Groups(places, len(ids) - int(is_fresh.sum()))

    def _shard(self, name: str) -> Shard:
        if name not in self._place_of:
            raise InvalidRequest(f"shard {shown(name)}: there are {', '.join(self.shards)}")
        return self._shards[self._place_of[name]]

    def _concerned(self) -> list[Shard]:
        return self._shards if self._own is None else [self._shard(self._own)]

    def _note_membership(self) -> None:
        membership = tuple((shard.name, shard.generation) for shard in self._shards if shard.takes_part)
        if membership != self._membership:
            self._membership = membership
            self.epoch += 1

    def _counts(self, rows: Sequence[int]) -> Counts:
        present = [shard.takes_part and self._own in (None, shard.name) for shard in self._shards]
        sizes = (shard.size_rows if takes_part else 0 for shard, takes_part in zip(self._shards, present, strict=True))
        return Counts(self.epoch, tuple(rows), tuple(shard.generation for shard in self._shards), tuple(sizes))

    def _split(self, n: int, by_mass: bool) -> list[int]:
        """``n`` rows over the shards that take part. Shards without a share are left out: rounding must not give them one."""
        concerned = {shard.name for shard in self._concerned() if shard.takes_part}
        if not concerned:
            raise ShardLost(f"no shard is left to sample from: {', '.join(shard.name for shard in self._concerned())}", shard=self._own)
        sizes = [float(shard.size_rows) if shard.name in concerned else 0.0 for shard in self._shards]
        masses = [shard.mass if shard.name in concerned else 0.0 for shard in self._shards]
        weights = masses if by_mass and sum(masses) > 0 else sizes
        if self.mode == "stratified":
            total = sum(weights)
            return largest_remainder([n * weight / total for weight in weights], n)
        places = [place for place, weight in enumerate(weights) if weight > 0]
        shares = np.array([weights[place] for place in places])
        rows = [0] * len(weights)
        for place, count in zip(places, self._generator.multinomial(n, shares / shares.sum()), strict=True):
            rows[place] = int(count)
        return rows


def largest_remainder(due: Sequence[float], n: int) -> list[int]:
    """Whole rows, ``n`` together, from what is ``due`` to each part: rounded down, then one more where most is missing.

    A part that is due nothing gets nothing; what is due may be below 0 or sum up to another number where rounding of earlier calls is
    made up for.
    """
    counts = [max(0, math.floor(rows)) for rows in due]
    order = sorted((part for part, rows in enumerate(due) if rows), key=lambda part: counts[part] - due[part])
    missing = n - sum(counts)
    for turn in range(missing):
        counts[order[turn % len(order)]] += 1
    for _ in range(-missing):
        counts[max(filter(counts.__getitem__, order), key=lambda part: counts[part] - due[part])] -= 1
    return counts


def importance_weights(priorities: Any, least: Any, beta: float) -> Any:
    """(N p / ΣS)^-β over that of the smallest positive priority: N and ΣS cancel. Of arrays and of tensors; 0 counts as ``least``."""
    return (least / priorities.clip(least)) ** beta
