"""A real daemon in a temporary run directory, as a child of the test."""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from replay_server_protocol.endpoints import Endpoints
from support.processes import Child, ChildFailed, Children

_READY_WITHIN_S = 20.0
_ASK_AGAIN_S = 0.01


class ServerProcess:
    """``replay-server serve`` in a child; ``name`` and ``run_dir`` are what clients connect with."""

    def __init__(self, child: Child, endpoints: Endpoints) -> None:
        self.child = child
        self.endpoints = endpoints

    @property
    def name(self) -> str:
        return self.endpoints.name

    @property
    def run_dir(self) -> Path:
        return self.endpoints.run_dir

    @property
    def pid(self) -> int:
        return self.child.pid

    def stop(self) -> int:
        """SIGTERM, then the exit status. A stopped server has let its clients go and left nothing behind."""
        if self.child.is_alive():
            self.child.send_signal(signal.SIGTERM)
        return self.child.wait()

    def kill(self) -> None:
        """kill -9, for tests of what a crash leaves."""
        self.child.kill()


def spawn_server(
    children: Children,
    run_dir: Path,
    *options: str,
    name: str | None = None,
    deadline_s: float | None = None,
    within: Sequence[str] = (),
) -> ServerProcess:
    """Starts ``python -m replay_server serve`` on the CPU and returns once both of its sockets listen.

    ``options`` come after the defaults, so they win; ``within`` is a command that runs the server's in a place of its own. Raises
    ChildFailed with the server's output if it ends or is not ready in time.
    """
    endpoints = Endpoints.resolve(name or f"t{secrets.token_hex(3)}", run_dir)
    command = [
        *within,
        sys.executable,
        "-m",
        "replay_server",
        "serve",
        "--name",
        endpoints.name,
        "--run-dir",
        str(run_dir),
        "--device",
        "cpu",
        *options,
    ]
    server = ServerProcess(children.start(command, name=f"server {endpoints.name}", deadline_s=deadline_s), endpoints)
    end = time.monotonic() + _READY_WITHIN_S
    while not (_listens(endpoints.control_path) and _listens(endpoints.status_path)):
        if not server.child.is_alive() or time.monotonic() > end:
            server.kill()
            raise ChildFailed(f"server {endpoints.name} was not ready within {_READY_WITHIN_S:g} s; its output:\n{server.child.output}")
        time.sleep(_ASK_AGAIN_S)  # another process's bind is no event here; bounded by the lines above
    return server


def _listens(path: Path) -> bool:
    """True when somebody accepts connections at ``path``: the file alone may be a dead server's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
