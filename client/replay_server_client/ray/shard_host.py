"""A shard as a learner of several nodes reaches it, and the one of its own node."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from replay_server_client.ray.host_service import HostService
from replay_server_client.ray.parcel import Asked, Drawn, Priorities


class ShardHost(Protocol):
    """Futures raise ServerGone when the shard is lost; calls may raise it too."""

    def draw(self, asked: Asked, timeout_s: float) -> Future[Drawn]: ...

    def write(self, told: Priorities) -> Future[int]:
        """How many priorities came too late."""

    def size(self) -> Future[tuple[int, int]]:
        """(generation, rows)."""

    def leave(self, learner: str) -> None:
        """This learner asks no more; waits for nothing."""

    def close(self) -> None: ...


class LocalHost:
    """The sidecar of this node, without a way round through an actor."""

    def __init__(self, server: str | None, run_dir: str | None) -> None:
        self._service = HostService(server, run_dir)
        self._draws = ThreadPoolExecutor(1, "local-shard")  # one thread: what is written comes before the next draw
        self._looks = ThreadPoolExecutor(1, "local-shard-looks")

    def draw(self, asked: Asked, timeout_s: float) -> Future[Drawn]:
        return self._draws.submit(self._service.draw, asked, timeout_s)

    def write(self, told: Priorities) -> Future[int]:
        return self._draws.submit(self._service.write, told)

    def size(self) -> Future[tuple[int, int]]:
        return self._looks.submit(self._service.size)

    def leave(self, learner: str) -> None:
        """``close`` lets go of all."""

    def close(self) -> None:
        self._draws.shutdown()
        self._looks.shutdown()
        self._service.close()
