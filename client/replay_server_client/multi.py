"""One learner of several servers of this host: batches from the union of their rings.

```
            ┌─ batch of shard 0, its window's size (and priority mass) ─┐
sample(n) ──┼─ batch of shard 1 ──────────────────────────────────────  ┼──► router: k_0 … ──► first k_i rows of each, in one batch
            └─ batch of shard 2 ────────────────────────────────────────┘
```

Every shard that takes part makes a batch of n rows ready ahead, as a learner of it alone would; once all are there their windows say how
many rows each of them was drawn from, and the router draws the counts under exactly those: each row of the batch is any row of the
union of these windows with equal probability, also while shards fill. What a shard drew beyond its count is left out, and only the rows
taken count as sampled (with prefetch, those of the batch before). The modes, epochs, floors and what a loss does are the router's: see
``router``.

A ring on another GPU is gathered there, by its own learner, and the rows taken are copied to the batch, from GPU to GPU where the two
can reach each other, through the host by the driver where not. So every GPU with a ring must be visible to this process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from replay_server_protocol.endpoints import RANK_VARIABLE, Endpoints
from replay_server_protocol.errors import InvalidRequest, ReplayTimeout, ServerGone, shown
from replay_server_protocol.schema import Schema
from torch import Tensor

from replay_server_client.batch import Batch
from replay_server_client.deadline import Deadline
from replay_server_client.draw import request_key
from replay_server_client.joint import Joint
from replay_server_client.learner import Learner, LearnerStatistics
from replay_server_client.learner_hello import default_name
from replay_server_client.mapping import check_device
from replay_server_client.multi_batch import MassReader, MultiBatch, Origin, weigh
from replay_server_client.request import Request
from replay_server_client.router import Counts, Mode, OnLoss, Router
from replay_server_client.shard import ShardLearner, seconds_left
from replay_server_client.union_learner import LOOK_AGAIN_S, UnionLearner, request_of_each


@dataclass(frozen=True, slots=True)
class MultiStatistics:
    """What this learner has done. ``rows`` by shard; ``stale_updates`` are priorities of rows whose shard was lost since.

    ``shards`` has the statistics of each shard's present learner; a lost one has none.
    """

    batches: int
    rows: dict[str, int]
    epoch: int
    losses: int
    stale_updates: int
    shards: dict[str, LearnerStatistics]


@dataclass(frozen=True, slots=True)
class _Connect:
    """How the learner of each shard is connected: fields as the arguments of ``Learner.connect``."""

    device: str
    seed: int
    name: str
    prefetch: int
    schema: Schema | None
    run_id: str | None
    compile: bool
    require_zero_copy: bool

    def __call__(self, endpoints: Endpoints, place: int, timeout: float | None) -> Learner:
        return Learner.connect(
            endpoints.name,
            device=self.device,
            seed=request_key(self.seed, place, endpoints.name, 0, 0),  # of equal seeds shards would draw rows at equal places
            name=self.name,
            prefetch=self.prefetch,
            run_dir=endpoints.run_dir,
            timeout=timeout,
            schema=self.schema,
            run_id=self.run_id,
            compile=self.compile,
            reattach=False,
            require_zero_copy=self.require_zero_copy,
        )


class MultiLearner(UnionLearner[MultiBatch]):
    """Samples from several servers of this host as from one. For one thread at a time. ``router`` knows the shards; it is to be read, not
    told. The memory of a batch's tensors is written again by the call after the one that ends it; ``max_age_rows``: each shard's newest."""

    def __init__(self, shards: Sequence[ShardLearner], router: Router, device: str) -> None:
        """Use ``connect``."""
        super().__init__(router)
        self._shards = shards
        self._device = device
        self._masses = MassReader()
        self._joints: dict[Request, Joint] = {}
        self._last: dict[Request, MultiBatch] = {}
        self._rows = dict.fromkeys(router.shards, 0)
        self._batches = self._stale_updates = 0

    @classmethod
    def connect(
        cls,
        servers: Sequence[str],
        *,
        mode: Mode = "global",
        own: str | None = None,
        min_size: int = 1,
        floor_rows: int | Sequence[int] = 1,
        on_loss: OnLoss = "redraw",
        device: str = "auto",
        seed: int = 0,
        name: str | None = None,
        prefetch: int = 1,
        run_dir: str | os.PathLike[str] | None = None,
        timeout: float | None = 10.0,
        schema: Schema | None = None,
        run_id: str | None = None,
        compile: bool = False,  # noqa: A002 - what torch calls it
        require_zero_copy: bool = False,
    ) -> Self:
        """Attaches to every server of ``servers``; in mode local to ``own`` alone, by default the one at LOCAL_RANK's place.

        ``mode``, ``min_size``, ``floor_rows`` (one, or one for each) and ``on_loss`` are the router's. Batches lie on ``device``: cpu, mps,
        cuda (the current GPU) or cuda:N, whichever GPU the rings are on; auto is the current GPU for rings on GPUs. The rest is as for
        ``Learner.connect``, of each. Raises what that raises, within one ``timeout``, and InvalidRequest.
        """
        if isinstance(servers, str):
            raise InvalidRequest(f"servers={shown(servers)}: a list of names")
        names, deadline = list(servers), Deadline(timeout)
        if mode == "local":
            own = _own_of(names) if own is None else Endpoints.resolve(own, run_dir).name  # fills in {local_rank}
        learner_name = default_name() if name is None else name
        if not isinstance(seed, int):
            raise InvalidRequest(f"seed={shown(seed)}: an integer")
        router_seed = request_key(seed, 0, learner_name, len(names), 0)
        router = Router(names, mode=mode, own=own, seed=router_seed, min_size=min_size, floor_rows=floor_rows, on_loss=on_loss)
        gathered_on = device if check_device(device) in ("cpu", "mps") else "auto"
        connect = _Connect(gathered_on, seed, learner_name, prefetch, schema, run_id, compile, require_zero_copy)
        wanted = {place: Endpoints.resolve(name, run_dir) for place, name in enumerate(names) if own in (None, name)}
        learner = cls([ShardLearner(place, endpoints, connect) for place, endpoints in wanted.items()], router, device)
        learner._attach(deadline, timeout)
        return learner

    def update_priorities(self, batch: MultiBatch, priorities: Tensor | Sequence[float]) -> None:
        """As ``Learner.update_priorities``, of each shard's rows to that shard. Those of a shard that was lost since, or has another
        generation, are left out and counted (``statistics().stale_updates``)."""
        if not isinstance(batch, MultiBatch) or not batch.memory().request.is_by_priority:
            raise InvalidRequest(f"batch={shown(batch)}: what this learner's sample(..., by='priority') returned")
        present = {(shard.place, shard.generation) for shard in self._shards if shard.is_alive}
        fresh = [part for part, origin in zip(batch.parts, batch.origins, strict=True) if origin in present]
        batch.write_priorities(priorities, fresh)
        self._stale_updates += len(batch) - sum(rows.stop - rows.start for _, rows in fresh)

    def progress(self) -> None:
        """As ``Learner.progress``, of every shard."""
        for shard in self._shards:
            if shard.learner is not None:
                shard.learner.progress()

    def statistics(self) -> MultiStatistics:
        losses = sum(shard.losses for shard in self._shards)
        each = {shard.name: shard.learner.statistics() for shard in self._shards if shard.learner is not None}
        return MultiStatistics(self._batches, dict(self._rows), self.router.epoch, losses, self._stale_updates, each)

    def close(self) -> None:
        """Closes the learner of each shard; batches handed out stay. Safe to call twice."""
        for shard in self._shards:
            shard.close()

    def _attach(self, deadline: Deadline, timeout: float | None) -> None:
        """To every shard; closes where one can't be."""
        try:
            for shard in self._shards:
                shard.attach(seconds_left(deadline, timeout))
        except BaseException:
            self.close()
            raise

    def _sample(self, asked: Request, timeout: float | None, alpha: float | None, beta: float | None) -> MultiBatch:
        request, deadline = request_of_each(asked), Deadline(timeout)
        if not self._was_ready:
            self.wait_ready(timeout)
        if (last := self._last.pop(request, None)) is not None:
            last.expire()
        taken = self._take(request, deadline, timeout, alpha, beta)
        counts = self.router.draw(request.n, by_mass=request.is_by_priority)
        self._last[request] = self._join(request, taken, counts)
        return self._last[request]

    def _is_ready(self) -> bool:
        for shard in self._shards:
            shard.look(self.router)
        return self._was_ready or not self.router.missing()

    def _take(
        self, request: Request, deadline: Deadline, timeout: float | None, alpha: float | None, beta: float | None
    ) -> list[tuple[ShardLearner, Batch]]:
        """A batch of every shard that takes part; the router is told what each was drawn from. While all are lost it waits."""
        while True:
            taken = []
            for shard in self._shards:
                if shard.name not in self.router.taking_part:
                    shard.look(self.router)
                if shard.name in self.router.taking_part and (batch := self._batch_of(shard, request, deadline, timeout, alpha, beta)):
                    taken.append((shard, batch))
            if taken or self.router.on_loss == "raise" or deadline.has_passed:
                return taken
            time.sleep(min(LOOK_AGAIN_S, deadline.remaining_s))

    def _batch_of(
        self, shard: ShardLearner, request: Request, deadline: Deadline, timeout: float | None, alpha: float | None, beta: float | None
    ) -> Batch | None:
        """None if the shard is lost; not a row of a batch that was made ready before is taken then."""
        try:
            if not shard.is_alive:
                raise ServerGone(f"server {shard.name!r} has ended")
            batch = shard.sampler(request).sample(timeout=seconds_left(deadline, timeout), alpha=alpha, beta=beta)
        except ServerGone:
            self.router.lose(shard.name)
            shard.lose()
            return None
        except ReplayTimeout as error:
            raise ReplayTimeout(f"shard {shard.name!r}: {error.message}", **error.details) from error
        mass, least = self._masses.read(batch) if request.tells_mass else (None, None)
        size_rows = batch.window[1] - batch.window[0]
        self.router.report(shard.name, generation=shard.generation, size_rows=size_rows, mass=mass, least=least)
        return batch

    def _join(self, request: Request, taken: Sequence[tuple[ShardLearner, Batch]], counts: Counts) -> MultiBatch:
        rows_each, some, origins = request.rows // request.n, [], []
        for shard, batch in taken:
            count = counts.rows[shard.place]
            shard.sampler(request).counted_rows = max(1, count * rows_each)
            self._rows[shard.name] += count * rows_each
            if count:
                some.append((batch, count))
                origins.append(Origin(shard.place, shard.generation))
        if request not in self._joints:
            self._joints[request] = Joint(_device_for(self._device, some[0][0]))
        batch = MultiBatch(*self._joints[request].join(some), origins, counts)
        if request.tells_mass:
            weigh(batch, self.router.least, taken[0][0].sampler(request).beta)
        self._batches += 1
        return batch


def _device_for(device: str, batch: Batch) -> torch.device:
    """Where joint batches lie: ``device``; with auto where the parts are, for parts on GPUs the current one."""
    found: torch.device = batch.memory().rows.device
    kind = found.type if device == "auto" else device
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _own_of(names: Sequence[str]) -> str:
    """The server of this process under torchrun."""
    rank = os.environ.get(RANK_VARIABLE, "")
    if not rank.isdecimal() or int(rank) >= len(names):
        raise InvalidRequest(f"mode='local' needs own=NAME, or LOCAL_RANK (torchrun sets it) below {len(names)}, the number of servers")
    return names[int(rank)]
