"""Batches of one request over several nodes: each shard asked for its share, what a lost one owes asked of the rest.

A batch asked for ahead must not end the one whose priorities are still to come, so two slots take turns where batches are asked for
ahead; a second question for the same batch has a slot of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass

import torch
from replay_server_protocol.errors import ReplayError, ReplayTimeout, ServerGone
from replay_server_protocol.schema import Schema

from replay_server_client.deadline import Deadline
from replay_server_client.multi_batch import weigh
from replay_server_client.ray.cluster_batch import Assembly, ClusterBatch, Part
from replay_server_client.ray.parcel import Asked, Drawn
from replay_server_client.ray.shard_host import ShardHost
from replay_server_client.request import Request, check_exponent
from replay_server_client.router import Counts, Router

_LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks: its name, its seed, and numbers that no two of its questions share."""

    name: str
    seed: int
    numbers: Iterator[int]


@dataclass(slots=True)
class Asking:
    """A batch whose rows are on their way; ``parts`` have come."""

    counts: Counts
    slot: int
    futures: dict[int, Future[Drawn]]
    parts: list[Part]


class ClusterSampler:
    """For one thread at a time."""

    def __init__(
        self, request: Request, router: Router, hosts: Mapping[str, ShardHost], asker: Asker, device: torch.device, turns: int
    ) -> None:
        self.request = request
        self.losses = 0
        self._router = router
        self._hosts = hosts
        self._asker = asker
        self._device = device
        self._wire = asdict(request)
        self._masses: dict[int, tuple[int, float, float]] = {}  # by the shard's place: generation, mass, least
        self._alpha: float | None = None
        self._beta: float | None = None
        self._default_beta = 0.0
        self._turns = turns
        self._turn = self._batches = 0
        self._assembly: Assembly | None = None
        self._ahead: Asking | None = None
        self._lent: ClusterBatch | None = None

    def set_exponents(self, alpha: float | None, beta: float | None) -> None:
        """Of the draws to come, where given. Raises InvalidRequest by name, and nothing has changed."""
        checked = (
            self._alpha if alpha is None else check_exponent("alpha", alpha),
            self._beta if beta is None else check_exponent("beta", beta),
        )
        if checked[0] != self._alpha:
            self._masses.clear()  # they were sums of other powers
        self._alpha, self._beta = checked

    def sample(self, deadline: Deadline) -> ClusterBatch:
        """The next batch; ends the one before. Raises ReplayTimeout naming the shard, ShardLost, and what a sidecar refuses."""
        if self._lent is not None:
            self._lent.expire()
        self._lent = self._filled(self._complete(deadline))
        return self._lent

    def ask_ahead(self, deadline: Deadline) -> None:
        """Asks for the next batch now. What goes wrong is left to ``sample``, which asks again."""
        if self._router.taking_part:
            with contextlib.suppress(ReplayError):
                self._ahead = self._begin(deadline)

    def close(self) -> None:
        for future in self._ahead.futures.values() if self._ahead is not None else ():
            future.cancel()
        self._ahead = None

    def _complete(self, deadline: Deadline) -> Asking:
        """A batch all of whose rows have come: that asked for ahead, or a new one."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            with contextlib.suppress(ReplayTimeout):  # its time was that of the call before: this one has its own
                return self._with_all_rows(ahead, deadline)
        return self._with_all_rows(self._begin(deadline), deadline)

    def _with_all_rows(self, asking: Asking, deadline: Deadline) -> Asking:
        while asking.futures:
            lost = self._collect(asking, deadline)
            if lost:
                self._tell_masses()
                counts = self._router.redraw(asking.counts, lost, by_mass=self.request.tells_mass)
                kept = [part for part in asking.parts if self._router.shards[part.place] not in lost]
                asking = self._ask(counts, asking.slot + self._turns, kept, deadline)
        return asking

    def _begin(self, deadline: Deadline) -> Asking:
        """Asks for the next batch."""
        self._turn = (self._turn + 1) % self._turns
        if self.request.tells_mass:
            self._learn_masses(deadline)
        counts = self._router.draw(self.request.n, by_mass=self.request.tells_mass)
        return self._ask(counts, self._turn, [], deadline)

    def _learn_masses(self, deadline: Deadline) -> None:
        """Asks shards whose mass is not known for it: by a draw of which no row is sent."""
        unknown = [
            place
            for place, shard in enumerate(self._router.shards)
            if shard in self._router.taking_part and self._masses.get(place, (0,))[0] != self._router.state(shard).generation
        ]
        if unknown:
            futures = {place: self._draw(place, 0, self._turn, deadline) for place in unknown}
            generations = tuple(self._router.state(shard).generation for shard in self._router.shards)
            none = Counts(self._router.epoch, (0,) * len(generations), generations, (0,) * len(generations))
            for shard in self._collect(Asking(none, self._turn, futures, []), deadline):
                self._router.lose(shard)
        self._tell_masses()

    def _tell_masses(self) -> None:
        """The router knows one mass of each shard: that of the request it draws for next."""
        for place, (generation, mass, least) in self._masses.items():
            known = self._router.state(self._router.shards[place])
            if known.is_up and known.generation == generation:
                self._router.report(known.name, generation=generation, size_rows=known.size_rows, mass=mass, least=least)

    def _ask(self, counts: Counts, slot: int, parts: list[Part], deadline: Deadline) -> Asking:
        """Asks each shard for what is due and has not come."""
        have = dict.fromkeys(range(len(counts.rows)), 0)
        for part in parts:
            have[part.place] += part.draws
        futures: dict[int, Future[Drawn]] = {}
        for place, rows in enumerate(counts.rows):
            if rows > have[place]:
                futures[place] = self._draw(place, rows - have[place], slot, deadline)
        return Asking(counts, slot, futures, parts)

    def _draw(self, place: int, draws: int, slot: int, deadline: Deadline) -> Future[Drawn]:
        key = self._asker.seed, place, next(self._asker.numbers)
        asked = Asked(self._asker.name, self._wire, slot, draws, key, self._alpha, self._beta)
        try:
            return self._hosts[self._router.shards[place]].draw(asked, min(deadline.remaining_s, _LONGEST_WAIT_S))
        except ServerGone as gone:
            failed: Future[Drawn] = Future()
            failed.set_exception(gone)
            return failed

    def _collect(self, asking: Asking, deadline: Deadline) -> list[str]:
        """Waits for all that was asked for; returns the shards that are lost."""
        lost = []
        for place, future in list(asking.futures.items()):
            shard = self._router.shards[place]
            try:
                drawn = future.result(None if deadline.timeout_s is None else deadline.remaining_s)
            except ServerGone:
                lost.append(shard)
                continue
            except ReplayTimeout as late:
                raise ReplayTimeout(f"shard {shard!r}: {late.message}", **late.details) from late
            except (FutureTimeout, TimeoutError) as late:
                raise ReplayTimeout(f"shard {shard!r} has not answered after {deadline.elapsed_s:.2f} s") from late
            finally:
                del asking.futures[place]
            if drawn.generation != asking.counts.generations[place]:
                lost.append(shard)  # another ring: it joins again by its size, above its floor
                continue
            self._router.report(shard, generation=drawn.generation, size_rows=drawn.size_rows)
            if drawn.mass is not None:
                self._masses[place] = drawn.generation, drawn.mass, math.inf if drawn.least is None else drawn.least
                self._default_beta = drawn.beta
            asking.parts.append(Part(place, asking.slot, drawn))
        self.losses += len(lost)
        return lost

    def _filled(self, asking: Asking) -> ClusterBatch:
        parts = sorted(asking.parts, key=lambda part: part.place)
        if self._assembly is None:
            self._assembly = Assembly(self.request, Schema.from_wire(parts[0].drawn.schema), self._device)
        self._assembly.fill(parts)
        self._batches += 1
        sizes = {self._router.shards[part.place]: part.drawn.size_rows for part in parts}
        batch = ClusterBatch(self._assembly.memory, self._batches, self._assembly.ids, parts, asking.counts, sizes)
        if self.request.tells_mass:
            leasts = [least for place, (_, _, least) in self._masses.items() if self._router.shards[place] in self._router.taking_part]
            weigh(batch, min(leasts, default=math.inf), self._default_beta if self._beta is None else self._beta)
        return batch
