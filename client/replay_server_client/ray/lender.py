"""Batches of the local sidecar for learners on other nodes: by priority, of n steps, of sequences, and from a ring on a GPU.

Each of those learners has a ``Learner`` here, a session of its own, which draws and gathers as one on this node would; what is sent is the
first rows of its batch. The batch stays lent until the next one of its request and slot: so priorities can be given to its rows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ServerGone
from torch import Tensor

from replay_server_client.batch import Batch
from replay_server_client.deadline import Deadline
from replay_server_client.draw import request_key
from replay_server_client.learner import Learner
from replay_server_client.ray.parcel import Asked, Drawn, Priorities
from replay_server_client.request import Request
from replay_server_client.sampler import Sampler

_IDLE_S = 300.0
_OF_THE_WINDOW = "mass_sums"


@dataclass(slots=True, eq=False)
class Guest:
    """A learner elsewhere: its Learner here, its samplers and the batch that each has lent."""

    learner: Learner
    generation: int
    used_s: float = 0.0
    samplers: dict[tuple[Request, int], Sampler] = field(default_factory=dict)
    lent: dict[tuple[Request, int], Batch] = field(default_factory=dict)

    def sample(self, asked: Asked, deadline: Deadline) -> Drawn:
        request = Request(**asked.request)
        key = request, asked.slot
        if key not in self.samplers:
            self.samplers[key] = self.learner.sampler_for(request)
        sampler = self.samplers[key]
        sampler.counted_rows = max(1, asked.draws * (request.rows // request.n))  # asked for by the call below, with no prefetch
        self.lent.pop(key, None)
        batch = sampler.sample(timeout=deadline.remaining_s, alpha=asked.alpha, beta=asked.beta)
        self.lent[key] = batch
        return _drawn(batch, asked.draws, self.generation, sampler.beta)


class Lender:
    """For one thread at a time."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._guests: dict[str, Guest] = {}

    def draw(self, asked: Asked, timeout_s: float) -> Drawn:
        """Raises ServerGone when the sidecar ended, ReplayTimeout naming what was missing, and what a sampler refuses."""
        deadline = Deadline(timeout_s)
        self._close_idle()
        try:
            guest = self._guest(asked, deadline)
            guest.used_s = time.monotonic()
            return guest.sample(asked, deadline)
        except ServerGone:
            self.leave(asked.learner)
            raise

    def write(self, told: Priorities) -> int:
        """How many came too late: their batch has ended, or the ring."""
        guest, key = self._guests.get(told.learner), (Request(**told.request), told.slot)
        batch = guest.lent.get(key) if guest is not None and guest.generation == told.generation == guest.learner.generation else None
        if batch is None or batch.number != told.number:
            return len(told.values)
        batch.memory().write_back.write_priorities(torch.from_numpy(told.values.copy()))  # what came by Ray is read-only
        return 0

    def leave(self, learner: str) -> None:
        """This learner has gone; what it wrote last goes with it, as with any learner's."""
        guest = self._guests.pop(learner, None)
        if guest is not None:
            guest.learner.close()

    def close(self) -> None:
        for learner in list(self._guests):
            self.leave(learner)

    def _guest(self, asked: Asked, deadline: Deadline) -> Guest:
        guest = self._guests.get(asked.learner)
        if guest is not None and guest.learner.generation != guest.generation:
            self.leave(asked.learner)
            guest = None
        if guest is None:
            seed, place, number = asked.key
            learner = Learner.connect(
                self._endpoints.name,
                run_dir=self._endpoints.run_dir,
                seed=request_key(seed, place, self._endpoints.name, number, 0),
                name=f"remote-{asked.learner[:16]}",
                prefetch=0,
                reattach=False,
                timeout=deadline.remaining_s,
            )
            generation = learner.generation
            if generation is None:
                learner.close()
                raise ServerGone(f"server {self._endpoints.name!r} ended as it was attached to")
            guest = self._guests[asked.learner] = Guest(learner, generation)
        return guest

    def _close_idle(self) -> None:
        now_s = time.monotonic()
        for learner in [name for name, guest in self._guests.items() if now_s - guest.used_s > _IDLE_S]:
            self.leave(learner)


def _drawn(batch: Batch, count: int, generation: int, beta: float) -> Drawn:
    """Copies in host memory of the first ``count`` draws, whose rows lie one behind the other."""
    memory = batch.memory()
    request = memory.request
    results = {name: _hosted(values, count).numpy() for name, values in memory.results.items() if name != _OF_THE_WINDOW}
    rows = _hosted(memory.rows, count * (request.rows // request.n)).numpy()
    size_rows = batch.window[1] - batch.window[0]
    mass, least = memory.results[_OF_THE_WINDOW].tolist() if request.tells_mass else (None, None)
    return Drawn(rows, results, memory.schema.to_wire(), generation, size_rows, mass, least, beta, batch.number)


def _hosted(values: Tensor, count: int) -> Tensor:
    return values[:count].clone() if values.is_cpu else values[:count].cpu()
