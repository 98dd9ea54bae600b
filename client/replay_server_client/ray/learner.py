"""A learner of rings on several nodes: counts drawn by the router, rows asked of each shard's host, one batch of fixed memory.

```
router.draw(n) ─► k_i ─► host i draws k_i rows ─► its slice of the batch, (generation, size and mass drawn under) ─► router.report
                           │ lost, or another generation
                           └─► router.redraw: its k_i from the rest
```

By priority k_i follows the masses that the shards told with their last rows; a shard whose mass is not known yet is asked for it, and for
no row. Knows nothing of Ray: a shard is whoever answers as a ``ShardHost``.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict
from typing import TypedDict

import torch
from replay_server_protocol.errors import InvalidRequest, ServerGone, shown
from torch import Tensor

from replay_server_client.deadline import Deadline
from replay_server_client.ray.cluster_batch import ClusterBatch
from replay_server_client.ray.cluster_sampler import Asker, ClusterSampler
from replay_server_client.ray.parcel import Priorities
from replay_server_client.ray.shard_host import ShardHost
from replay_server_client.request import Request
from replay_server_client.router import Mode, OnLoss, Router
from replay_server_client.union_learner import UnionLearner, request_of_each

_LOOK_EVERY_S = 0.2
_LOOK_WAIT_S = 5.0


class LearnerOptions(TypedDict, total=False):
    """Of ClusterLearner."""

    mode: Mode
    own: str | None
    min_size: int
    floor_rows: int | Sequence[int]
    on_loss: OnLoss
    seed: int
    device: str
    prefetch: bool


class ClusterLearner(UnionLearner[ClusterBatch]):
    """Samples from several nodes' shards as from one. For one thread at a time. ``router`` is to be read, not told. Without
    ``max_age_rows``: InvalidRequest."""

    def __init__(
        self,
        hosts: Mapping[str, ShardHost],
        *,
        mode: Mode = "global",
        own: str | None = None,
        min_size: int = 1,
        floor_rows: int | Sequence[int] = 1,
        on_loss: OnLoss = "redraw",
        seed: int = 0,
        device: str = "cpu",
        prefetch: bool = True,
    ) -> None:
        """``mode`` to ``on_loss`` are the router's; batches lie on ``device``, cpu or cuda[:N]. With ``prefetch`` the next batch is asked
        for as one is returned: its counts follow the sizes and masses of that moment, and rows of a shard that is lost just then may still
        be in it; without, each call waits for a round trip."""
        super().__init__(Router(list(hosts), mode=mode, own=own, seed=seed, min_size=min_size, floor_rows=floor_rows, on_loss=on_loss))
        self._device = torch.device(device)
        if self._device.type not in ("cpu", "cuda"):
            raise InvalidRequest(f"device={shown(device)}: batches of several nodes lie on cpu or cuda")
        self._stale_updates = 0
        self._hosts = dict(hosts)
        self._asker = Asker(secrets.token_hex(16), seed, itertools.count(1))
        self._is_prefetching = prefetch
        self._looks: dict[str, Future[tuple[int, int]]] = {}
        self._look_at_s = dict.fromkeys(hosts, 0.0)
        self._samplers: dict[Request, ClusterSampler] = {}
        self._updates: list[tuple[Future[int], int]] = []

    @property
    def losses(self) -> int:
        """How often a shard was lost that was asked for rows."""
        return sum(sampler.losses for sampler in self._samplers.values())

    def update_priorities(self, batch: ClusterBatch, priorities: Tensor | Sequence[float]) -> None:
        """Sends each shard the new priorities, finite and 0 or above, of its draws; they count from its next
        draw on, with prefetch from the next but one.

        Waits for nothing but a copy from a GPU. Those for a shard that was lost since, has another generation, or whose host was lost
        meanwhile are left out and counted (``stale_updates``).
        """
        if not isinstance(batch, ClusterBatch) or not batch.memory().request.is_by_priority:
            raise InvalidRequest(f"batch={shown(batch)}: what this learner's sample(..., by='priority') returned")
        given = torch.as_tensor(priorities).detach().reshape(-1).to("cpu", torch.float32).numpy()
        if len(given) != len(batch):
            raise InvalidRequest(f"priorities {len(given):,}: one for each of {len(batch):,} draws is right")
        wire, end = asdict(batch.memory().request), 0
        for part in batch.parts:
            begin, end = end, end + part.draws
            shard = self.router.shards[part.place]
            told = Priorities(self._asker.name, wire, part.slot, part.drawn.number, part.drawn.generation, given[begin:end].copy())
            known = self.router.state(shard)
            if not known.is_up or known.generation != part.drawn.generation:
                self._stale_updates += part.draws
                continue
            try:
                self._updates.append((self._hosts[shard].write(told), part.draws))
            except ServerGone:
                self._stale_updates += part.draws

    def stale_updates(self, timeout: float | None = 0.0) -> int:
        """Priorities that came too late, as far as the hosts have answered within ``timeout`` seconds."""
        deadline = Deadline(timeout)
        for _ in range(len(self._updates)):
            future, count = self._updates.pop(0)  # first: an error that is its answer is raised once
            try:
                self._stale_updates += future.result(None if timeout is None else deadline.remaining_s)
            except ServerGone:
                self._stale_updates += count
            except (FutureTimeout, TimeoutError):
                self._updates.append((future, count))
        return self._stale_updates

    def close(self) -> None:
        """Lets go of the hosts. Safe to call twice."""
        for sampler in self._samplers.values():
            sampler.close()
        for host in self._hosts.values():
            with contextlib.suppress(ServerGone):
                host.leave(self._asker.name)
            host.close()

    def _sample(self, asked: Request, timeout: float | None, alpha: float | None, beta: float | None) -> ClusterBatch:
        sampler, deadline = self._sampler(asked), Deadline(timeout)
        if (alpha is not None or beta is not None) and not asked.is_by_priority:
            raise InvalidRequest("alpha and beta are exponents of priorities: sample with by='priority'")
        sampler.set_exponents(alpha, beta)
        if not self._was_ready:
            self.wait_ready(timeout)
        self._look()
        batch = sampler.sample(deadline)
        if self._is_prefetching:
            sampler.ask_ahead(Deadline(timeout))
        if len(self._updates) > len(self._hosts):
            self.stale_updates()
        return batch

    def _sampler(self, asked: Request) -> ClusterSampler:
        if asked.max_age_rows is not None:
            raise InvalidRequest("max_age_rows is not there over several nodes: a shard's newest rows are no window of the union")
        request = request_of_each(asked)
        if request not in self._samplers:
            turns = 2 if self._is_prefetching else 1
            self._samplers[request] = ClusterSampler(request, self.router, self._hosts, self._asker, self._device, turns)
        return self._samplers[request]

    def _is_ready(self) -> bool:
        self._look()
        return not self.router.missing()

    def _look(self) -> None:
        """Asks shards that take no part what they hold, five times a second; never waits."""
        now_s = time.monotonic()
        for shard, host in self._hosts.items():
            if shard in self.router.taking_part:
                continue
            look = self._looks.get(shard)
            if look is not None and look.done():
                self._take_look(shard, self._looks.pop(shard))
            elif look is None and now_s >= self._look_at_s[shard]:
                self._look_at_s[shard] = now_s + _LOOK_EVERY_S
                with contextlib.suppress(ServerGone):
                    self._looks[shard] = host.size()
            elif look is not None and now_s >= self._look_at_s[shard] + _LOOK_WAIT_S:
                del self._looks[shard]  # asked of an actor that is no more

    def _take_look(self, shard: str, look: Future[tuple[int, int]]) -> None:
        with contextlib.suppress(ServerGone):
            generation, size_rows = look.result()
            self.router.report(shard, generation=generation, size_rows=size_rows)
