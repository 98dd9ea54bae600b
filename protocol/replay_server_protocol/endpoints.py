"""Where a server is found: its run directory, its sockets, and the names it may have.

```
RUN_DIR (0700)/
  NAME.control    ipc socket of the sessions (ROUTER)
  NAME.status     ipc socket of the status report
  NAME.lock       held by flock for as long as the server lives; its text names pid, start time and run id
  NAME.learners   pid and start time of every learner that maps the ring (read by the next server of this name)
```
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from replay_server_protocol.errors import InvalidRequest, shown

DEFAULT_NAME = "default"
NAME_VARIABLE = "REPLAY_SERVER_NAME"
RUN_DIR_VARIABLE = "REPLAY_SERVER_RUN_DIR"
RANK_VARIABLE = "LOCAL_RANK"
RANK_PLACE = "{local_rank}"
SPAWNED_DIRS = "replay-" + 8 * "[0-9a-f]"
"""What ReplayServer.spawn calls the run directories that it takes in the temporary folder, as a glob."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
_SOCKET_PATH_BYTES = 103
"""sun_path less its end: 107 on Linux, 103 on macOS; the smaller one holds everywhere."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Paths and addresses of the server called ``name`` in ``run_dir``."""

    run_dir: Path
    name: str

    @classmethod
    def resolve(cls, name: str | None = None, run_dir: str | os.PathLike[str] | None = None) -> Endpoints:
        """Fills in what is not given: name from $REPLAY_SERVER_NAME, else "default"; run directory from
        $REPLAY_SERVER_RUN_DIR, else $XDG_RUNTIME_DIR/replay-server, else replay-server-UID in the temporary folder.

        ``{local_rank}`` in the name stands for $LOCAL_RANK, which torchrun gives every process: with ``gpu{local_rank}`` each finds the
        server of its GPU.

        Raises InvalidRequest for a name that can't be a file name or a path too long for a socket.
        """
        if name is not None and not isinstance(name, str):
            check_name(name)
        endpoints = cls(_resolve_run_dir(run_dir), check_name(_ranked(name or os.environ.get(NAME_VARIABLE) or DEFAULT_NAME)))
        longest = max(len(os.fsencode(path)) for path in (endpoints.control_path, endpoints.status_path))
        if longest > _SOCKET_PATH_BYTES:
            raise InvalidRequest(
                f"run directory {endpoints.run_dir} is too long: a socket path may have {_SOCKET_PATH_BYTES} bytes, "
                f"this one has {longest}; give a shorter --run-dir",
                bytes=longest,
                limit_bytes=_SOCKET_PATH_BYTES,
            )
        return endpoints

    @property
    def is_spawned(self) -> bool:
        """Whether the run directory is one that ReplayServer.spawn took, for as long as its server lives."""
        return self.run_dir.match(SPAWNED_DIRS)

    @property
    def control_path(self) -> Path:
        return self.run_dir / f"{self.name}.control"

    @property
    def status_path(self) -> Path:
        return self.run_dir / f"{self.name}.status"

    @property
    def lock_path(self) -> Path:
        return self.run_dir / f"{self.name}.lock"

    @property
    def learners_path(self) -> Path:
        return self.run_dir / f"{self.name}.learners"

    @property
    def control(self) -> str:
        return f"ipc://{self.control_path}"

    @property
    def status(self) -> str:
        return f"ipc://{self.status_path}"


def check_name(name: str, what: str = "server name") -> str:
    """Returns ``name`` if it can stand in a path and in a log line; raises InvalidRequest otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{what} {shown(name)}: letters, digits, '_', '.' and '-' only, starting with a letter or digit, at most 32")
    return name


def _ranked(name: str) -> str:
    if RANK_PLACE not in name:
        return name
    rank = os.environ.get(RANK_VARIABLE, "")
    if not rank.isdecimal():
        raise InvalidRequest(f"server name {shown(name)} needs ${RANK_VARIABLE}: start with torchrun, or set it to this process's GPU")
    return name.replace(RANK_PLACE, rank)


def _resolve_run_dir(run_dir: str | os.PathLike[str] | None) -> Path:
    if run_dir is not None and not isinstance(run_dir, str | os.PathLike):
        raise InvalidRequest(f"run_dir={shown(run_dir)}: a path")
    chosen = run_dir or os.environ.get(RUN_DIR_VARIABLE)
    if chosen:
        return _absolute(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "replay-server"
    return Path(tempfile.gettempdir()) / f"replay-server-{os.getuid()}"


def _absolute(run_dir: str | os.PathLike[str]) -> Path:
    """Raises InvalidRequest for what no socket can be bound to: ZeroMQ takes UTF-8 addresses alone."""
    try:
        path = Path(run_dir).expanduser().absolute()
        is_plain = "\0" not in str(path) and bool(str(path).encode())
    except (TypeError, ValueError, RuntimeError) as error:  # a path of bytes, not UTF-8, a home of nobody
        raise InvalidRequest(f"run directory {shown(run_dir)}: {error}; give another --run-dir") from error
    if not is_plain:
        raise InvalidRequest(f"run directory {shown(run_dir)} has a zero byte; give another --run-dir")
    return path
