"""A forwarder without Ray: a relay in a process of its own, whose calls of the host come to the test's process by a socket.

A call that was sent is carried out whatever becomes of its sender, maybe late: as with Ray, a forwarder's last calls may come after
the first ones of its successor.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from replay_server_client.ray.carrier import ChunkCarrier
from replay_server_client.ray.delivery import Delivery
from replay_server_client.ray.host_service import HostService
from replay_server_client.ray.parcel import Answer, Bytes, Header
from replay_server_client.ray.spread import Spread
from support.processes import Child, Children

from replay_server.config import ServerConfig
from replay_server.relay import RelayServer

_LATE_S = 0.15


class HostDoor:
    """Answers calls of ``service`` by the socket ``path``; some of the deliveries are late."""

    def __init__(self, service: HostService, path: Path, seed: int) -> None:
        self.path = path
        self.deliveries = 0
        self._service = service
        self._rng = random.Random(seed)
        self._listener = Listener(str(path), "AF_UNIX")
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Once no relay lives that could call."""
        Client(str(self.path), "AF_UNIX").close()  # wakes the listener, which a call without a word ends
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            connection = self._listener.accept()
            try:
                call = connection.recv()
            except EOFError:
                connection.close()
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection, call)))
            self._threads[-1].start()

    def _serve(self, connection: Connection[Any, Any], call: tuple[str, tuple[Any, ...]]) -> None:
        with connection, contextlib.suppress(EOFError, ConnectionError):
            while True:
                verb, arguments = call
                self.deliveries += verb == "deliver"
                if verb == "deliver" and self._rng.random() < 0.1:
                    time.sleep(self._rng.random() * _LATE_S)
                try:
                    answer = getattr(self._service, verb)(*arguments)
                except Exception as error:  # noqa: BLE001 - the caller's to raise
                    answer = error
                connection.send(answer)
                call = connection.recv()


class CallsByDoor:
    """HostCalls of a relay in another process."""

    def __init__(self, path: str) -> None:
        self._connection = Client(path, "AF_UNIX")
        self._pool = ThreadPoolExecutor(1)

    def agree(self, schema: dict[str, object]) -> dict[str, object]:
        options: dict[str, object] = self._pool.submit(self._call, "agree", schema).result()
        return options

    def deliver(self, headers: Sequence[Header], rows: Bytes, schema: dict[str, object]) -> Future[Answer]:
        return self._pool.submit(self._call, "deliver", headers, rows, schema)

    def forget(self, origins: Sequence[str]) -> None:
        self._pool.submit(self._call, "forget", origins)

    def _call(self, verb: str, *arguments: object) -> Any:
        self._connection.send((verb, arguments))
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def serve_relay(name: str, run_dir: str, depth: int, *doors: str) -> None:
    """Serves until it is killed; each collector's rows go through one of the doors."""
    carrier = Spread({door: ChunkCarrier(CallsByDoor(door), Delivery(chunk_bytes=2000, linger_s=0.002)) for door in doors})
    carrier.start()
    RelayServer(ServerConfig(name=name, run_dir=run_dir, device="cpu", depth=depth), carrier).run()


def spawn_relay(children: Children, name: str, run_dir: Path, depth: int, doors: Sequence[HostDoor]) -> Child:
    source = "import sys; from support.relays import serve_relay; serve_relay(*sys.argv[1:3], int(sys.argv[3]), *sys.argv[4:])"
    return children.script(source, name, str(run_dir), str(depth), *(str(door.path) for door in doors))
