"""One shard as a learner of several reaches it: attached in one generation, or lost and looked for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ServerGone

from replay_server_client.deadline import Deadline
from replay_server_client.learner import Learner
from replay_server_client.request import Request
from replay_server_client.router import Router
from replay_server_client.sampler import Sampler
from replay_server_client.silence import is_held
from replay_server_client.status import query

_LOOK_EVERY_S = 0.1
_LOOK_S = 0.2
_ATTACH_AGAIN_S = 1.0


class ShardLearner:
    """``learner`` is None while the shard is lost; each generation has a learner of its own."""

    def __init__(self, place: int, endpoints: Endpoints, connect: Callable[[Endpoints, int, float | None], Learner]) -> None:
        """``connect`` attaches: (endpoints, place, seconds)."""
        self.place = place
        self.endpoints = endpoints
        self.learner: Learner | None = None
        self.generation = 0
        self.losses = 0
        self._connect = connect
        self._samplers: dict[Request, Sampler] = {}
        self._look_at_s = 0.0

    @property
    def name(self) -> str:
        return self.endpoints.name

    @property
    def is_alive(self) -> bool:
        """Whether the server of the present generation lives, asked of the system at once."""
        return self.learner is not None and self.learner.generation == self.generation

    def attach(self, timeout_s: float | None) -> None:
        """Raises what ``Learner.connect`` raises."""
        learner = self._connect(self.endpoints, self.place, timeout_s)
        generation = learner.generation
        if generation is None:
            learner.close()
            raise ServerGone(f"server {self.name!r} ended as it was attached to")
        self.learner, self.generation = learner, generation

    def lose(self) -> None:
        """Lets go of the ring; batches handed out stay. Looked for from now on."""
        learner, self.learner = self.learner, None
        self._samplers.clear()
        if learner is not None:
            self.losses += 1
            learner.close()

    def sampler(self, request: Request) -> Sampler:
        """Of the present generation. Raises ServerGone while there is none."""
        if self.learner is None:
            raise ServerGone(f"server {self.name!r} is lost")
        if request not in self._samplers:
            self._samplers[request] = self.learner.sampler_for(request)
        return self._samplers[request]

    def look(self, router: Router) -> None:
        """Tells the router what a shard that takes no part holds now; attaches once it is above its floor. At most ten times a second.

        Raises what ``Learner.connect`` raises but ServerGone.
        """
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        if self.learner is not None and not self.is_alive:
            router.lose(self.name)
            self.lose()
        with contextlib.suppress(ServerGone):
            if self.learner is not None or is_held(self.endpoints):
                self._tell(router)
        self._look_at_s = time.monotonic() + _LOOK_EVERY_S

    def _tell(self, router: Router) -> None:
        report = query(self.endpoints, _LOOK_S)
        ring, generation = report.get("ring"), report.get("generation")
        size = ring.get("size_rows") if isinstance(ring, dict) else 0
        if not isinstance(size, int) or not isinstance(generation, int):
            return
        if self.learner is None and size >= max(1, router.state(self.name).floor_rows):
            self.attach(_ATTACH_AGAIN_S)
        if self.learner is None or self.generation == generation:
            router.report(self.name, generation=generation, size_rows=size)

    def close(self) -> None:
        learner, self.learner = self.learner, None
        if learner is not None:
            learner.close()


def seconds_left(deadline: Deadline, timeout: float | None) -> float | None:
    return None if timeout is None else deadline.remaining_s
