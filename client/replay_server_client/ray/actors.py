"""The two actors, thin: what they do is HostService's and RelayServer's. Ray restarts them; nothing that matters lives in them."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, cast

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from replay_server_protocol.errors import ReplayError, ServerGone

from replay_server.config import ServerConfig
from replay_server.relay import RelayServer
from replay_server_client.ray.carrier import ChunkCarrier
from replay_server_client.ray.delivery import WINDOW_CHUNKS, Delivery
from replay_server_client.ray.host_service import HostService
from replay_server_client.ray.names import HOST_PREFIX, NAMESPACE
from replay_server_client.ray.parcel import Answer, Asked, Bytes, Drawn, Header, Priorities
from replay_server_client.ray.spread import Spread

LEAST_DEPTH = 8
_AGREE_WAIT_S = 20.0


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, concurrency_groups={"deliver": 1, "draw": 1, "look": 2})
class ReplayHost:
    """One per sidecar, on its node. Claims no GPU: a ring on one is read through its own mapping, by UUID."""

    def __init__(self, server: str | None, run_dir: str | None) -> None:
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # some versions of Ray hide all GPUs from an actor that claims none
            del os.environ["CUDA_VISIBLE_DEVICES"]
        self._service = HostService(server, run_dir)

    @ray.method(concurrency_group="look")  # not behind deliveries that wait for credits
    def agree(self, schema: dict[str, object]) -> dict[str, object]:
        return self._service.agree(schema)

    @ray.method(concurrency_group="deliver")
    def deliver(self, headers: Sequence[Header], rows: Bytes, schema: dict[str, object]) -> Answer:
        return self._service.deliver(headers, rows, schema)

    @ray.method(concurrency_group="deliver")
    def forget(self, origins: Sequence[str]) -> None:
        self._service.forget(origins)

    @ray.method(concurrency_group="draw")
    def draw(self, asked: Asked, timeout_s: float) -> Drawn:
        return self._service.draw(asked, timeout_s)

    @ray.method(concurrency_group="draw")  # one thread: what is written comes before the next draw
    def write(self, told: Priorities) -> int:
        return self._service.write(told)

    @ray.method(concurrency_group="draw")
    def leave(self, learner: str) -> None:
        self._service.leave(learner)

    @ray.method(concurrency_group="look")
    def size(self) -> tuple[int, int]:
        return self._service.size()

    @ray.method(concurrency_group="look")
    def report(self) -> dict[str, object]:
        return self._service.report()


class RemoteHost:
    """The host of ``shard``, wherever it is; asked for again by name after it died for good, since another may have its place."""

    def __init__(self, shard: str) -> None:
        self.shard = shard
        self._actor: Any = None

    def agree(self, schema: dict[str, object]) -> dict[str, object]:
        try:
            return cast("dict[str, object]", ray.get(self._handle().agree.remote(schema), timeout=_AGREE_WAIT_S))
        except RayError as error:
            raise self._ours(error) from error

    def deliver(self, headers: Sequence[Header], rows: Bytes, schema: dict[str, object]) -> Future[Answer]:
        return self._watched(self._handle().deliver.remote(headers, rows, schema))

    def forget(self, origins: Sequence[str]) -> None:
        self._handle().forget.remote(origins)

    def draw(self, asked: Asked, timeout_s: float) -> Future[Drawn]:
        return self._watched(self._handle().draw.remote(asked, timeout_s))

    def write(self, told: Priorities) -> Future[int]:
        return self._watched(self._handle().write.remote(told))

    def leave(self, learner: str) -> None:
        self._handle().leave.remote(learner)

    def size(self) -> Future[tuple[int, int]]:
        return self._watched(self._handle().size.remote())

    def close(self) -> None:
        """The host is not this one's to end."""

    def _handle(self) -> Any:
        if self._actor is None:
            try:
                self._actor = ray.get_actor(HOST_PREFIX + self.shard, namespace=NAMESPACE)
            except ValueError as error:
                raise ServerGone(
                    f"there is no ReplayHost of shard {self.shard!r} in this cluster: start_host({self.shard!r}, …)"
                ) from error
        return self._actor

    def _ours(self, error: RayError) -> Exception:
        """What the host raised, as it raised it; all that Ray says of a lost actor, node or answer as ServerGone."""
        if isinstance(error, RayTaskError):
            return error.cause if isinstance(error.cause, ReplayError) else cast("Exception", error)
        if not isinstance(error, ActorUnavailableError | GetTimeoutError):
            self._actor = None  # for good: another may have its name by now
        return ServerGone(f"the ReplayHost of shard {self.shard!r} does not answer ({type(error).__name__})")

    def _watched(self, ref: Any) -> Future[Any]:
        """Its future."""
        found: Future[Any] = Future()
        found.set_running_or_notify_cancel()  # a call that was made can't be taken back

        def copy(done: Future[Any]) -> None:
            error = done.exception()
            if isinstance(error, RayError):
                error = self._ours(error)
            if error is not None:
                found.set_exception(error)
            else:
                found.set_result(done.result())

        ref.future().add_done_callback(copy)
        return found


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, concurrency_groups={"look": 2})
class Forwarder:
    """One per node with collectors: a server there in all but the ring. Collectors connect to it by ``name`` as to any sidecar."""

    def __init__(self, shards: Sequence[str], name: str, run_dir: str | None, depth: int | None, chunk_bytes: int) -> None:
        self._carrier = Spread({shard: ChunkCarrier(RemoteHost(shard), Delivery(chunk_bytes=chunk_bytes)) for shard in shards})
        self._carrier.start()
        config = ServerConfig(name=name, run_dir=run_dir, device="cpu", depth=depth or LEAST_DEPTH)
        ahead_bytes = WINDOW_CHUNKS * chunk_bytes if depth is None else 0
        self._server = RelayServer(config, self._carrier, ahead_bytes=ahead_bytes)
        self._thread = threading.Thread(target=self._serve, name="relay", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._server.run()
        except BaseException:  # noqa: BLE001 - a forwarder without its loop must not look alive
            os._exit(1)  # Ray starts it again; collectors notice the death and attach to the next one
        self._server.close()

    @ray.method(concurrency_group="look")
    def report(self) -> dict[str, object]:
        endpoints = self._server.replay.directory.endpoints
        found: dict[str, object] = {"pid": os.getpid(), "server": endpoints.name, "run_dir": str(endpoints.run_dir)}
        shards = {shard: asdict(counts) for shard, counts in self._carrier.counts().items()}
        return found | {"collectors": len(self._server.replay.sessions), "shards": shards}

    @ray.method(concurrency_group="look")
    def stop(self) -> None:
        """Collectors are told; what they had published is carried to its end as far as two seconds allow."""
        self._server.ask_to_stop()
        self._thread.join(10)
        self._carrier.close()
