"""A server started by a training script: its own, ended with it also when that is killed; or one that is kept for the next script."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from replay_server_protocol.endpoints import NAME_VARIABLE, RUN_DIR_VARIABLE, Endpoints
from replay_server_protocol.errors import AlreadyServing, InvalidRequest, ReplayTimeout, ServerGone, shown

from replay_server.config import ServerConfig
from replay_server.exit_codes import error_of
from replay_server.kept import check_fits, log_path, open_log

_STOP_S = 10.0
_LOOK_AGAIN_S = 0.05
_LOG_BYTES = 1 << 16


class ReplayServer:
    """A living sidecar. Use ``spawn``; leave the ``with`` block, or call ``close``, to end it."""

    def __init__(self, process: subprocess.Popen[bytes] | None, endpoints: Endpoints, own_dir: Path | None, pid: int) -> None:
        self._process = process  # None: not ours to end
        self._pid = pid
        self._endpoints = endpoints
        self._own_dir = own_dir
        self._owner_pid = os.getpid()
        self._before: dict[str, str | None] = {}
        self._log: IO[bytes] | None = None  # of a server that ends with this process

    @classmethod
    def spawn(
        cls, *, timeout: float = 30.0, name: str | None = None, run_dir: str | None = None, keep: bool = False, **options: Any
    ) -> Self:
        """Starts a server and returns when it answers, within ``timeout`` seconds.

        ``options`` are those of ``replay-server serve`` with underscores (``capacity=100_000, device="auto"``). Without a name a unique
        one is taken in a run directory of its own. The server's process group is its own, so that Ctrl-C reaches the script first. Exports
        REPLAY_SERVER_NAME and REPLAY_SERVER_RUN_DIR for clients of this process and its children. The server ends when this process does.
        What it prints is read by ``log_lines``, also after its death, and from outside while it lives at ``/proc/PID/fd/2``.

        With ``keep`` the server is one that survives the script: the living one of that name (default: $REPLAY_SERVER_NAME, else
        "default"; run directory as for clients) if its options, schema and run are those asked for, else a new one, which logs to
        RUN_DIR/NAME.log. ``close`` only forgets it; ``replay-server stop`` ends it. AttachRefused names what differs.

        Raises the typed error the server ended with (InvalidRequest, BudgetExceeded, DeviceError …) or ReplayTimeout.
        """
        if not (isinstance(timeout, Real) and timeout >= 0):
            raise InvalidRequest(f"timeout={shown(timeout)}: seconds, at least 0")
        texts = {key: _text(key, value) for key, value in options.items() if value is not None}
        config = ServerConfig.from_options(dict(texts))
        if not isinstance(keep, bool):
            raise InvalidRequest(f"keep={shown(keep)}: True or False")
        if keep:
            server = cls._kept(Endpoints.resolve(name, run_dir), config, texts, timeout)
            server._export()
            return server
        own_dir = None if run_dir is not None else Path(tempfile.gettempdir()) / f"replay-{secrets.token_hex(4)}"  # the server makes it
        own_name = f"spawned-{os.getpid()}-{secrets.token_hex(3)}" if name is None else name
        endpoints = Endpoints.resolve(own_name, own_dir if run_dir is None else run_dir)
        log = tempfile.TemporaryFile()  # noqa: SIM115 - the server's for as long as it lives; without a name nothing is left of it
        try:
            server = cls._start(endpoints, own_dir, {"parent_pid": str(os.getpid()), **texts}, timeout, log)
        except BaseException:
            log.close()
            raise
        server._log = log
        server._export()
        return server

    @classmethod
    def _kept(cls, endpoints: Endpoints, config: ServerConfig, texts: dict[str, str], timeout: float) -> Self:
        """Attaches to the living server of that name, or starts it. Of two scripts that start it at once one attaches."""
        end = time.monotonic() + timeout
        while True:
            if endpoints.status_path.exists():
                with contextlib.suppress(ServerGone):
                    report = _query(endpoints, 1.0)
                    check_fits(report, config)
                    return cls(None, endpoints, None, int(report["pid"]))
            with contextlib.suppress(AlreadyServing), open_log(endpoints) as log:
                server = cls._start(endpoints, None, texts, max(0.0, end - time.monotonic()), log)
                process, server._process = server._process, None
                if process is not None:
                    process.returncode = 0  # it outlives this process, which never waits for it
                return server
            if time.monotonic() >= end:
                raise ReplayTimeout(f"server {endpoints.name!r} holds its name but did not answer within {timeout:g} s; see its log")
            time.sleep(_LOOK_AGAIN_S)

    @classmethod
    def _start(cls, endpoints: Endpoints, own_dir: Path | None, texts: dict[str, str], timeout: float, log: IO[bytes]) -> Self:
        command = [sys.executable, "-m", "replay_server", "serve", "--name", endpoints.name, "--run-dir", str(endpoints.run_dir)]
        for key, text in texts.items():
            command += [f"--{key.replace('_', '-')}", text]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        server = cls(process, endpoints, own_dir, process.pid)
        try:
            server._wait_until_it_answers(process, timeout, log)
        except BaseException:
            server.close()
            raise
        return server

    @property
    def name(self) -> str:
        return self._endpoints.name

    @property
    def run_dir(self) -> str:
        return str(self._endpoints.run_dir)

    @property
    def pid(self) -> int:
        return self._pid

    def status(self, timeout: float = 5.0) -> dict[str, Any]:
        """The status report; raises ServerGone if the server doesn't answer within ``timeout`` seconds, with its last words if it ended."""
        process = self._process
        if process is not None and (code := process.poll()) is not None:
            raise ServerGone(f"server {self.name!r} (pid {self.pid}) ended with exit code {code}; its log ends: {_told(self.log_lines(5))}")
        return _query(self._endpoints, timeout)

    def log_lines(self, last: int = 20) -> list[str]:
        """The last lines that the server printed: also when it has died, until ``close``. Of a kept one those of RUN_DIR/NAME.log."""
        if self._log is not None:
            return _lines(self._log)[-last:]
        with contextlib.suppress(OSError), open(log_path(self._endpoints), "rb") as log:
            return _lines(log)[-last:]
        return []

    def close(self) -> None:
        """Stops the server in good order, by force after 10 s, and removes its run directory if it was made here; forgets one that is
        kept. Safe to call twice."""
        if os.getpid() != self._owner_pid:
            return
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for variable, value in self._before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        self._before = {}
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._own_dir is not None:
            shutil.rmtree(self._own_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _export(self) -> None:
        for variable, value in ((NAME_VARIABLE, self.name), (RUN_DIR_VARIABLE, self.run_dir)):
            self._before[variable] = os.environ.get(variable)
            os.environ[variable] = value

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes], timeout: float, log: IO[bytes]) -> None:
        end = time.monotonic() + timeout
        while process.poll() is None:
            with contextlib.suppress(ServerGone):
                if self.status(timeout=0.2)["pid"] == process.pid:
                    return
                time.sleep(0.02)  # another server of this name answers; ours is about to end, saying so
            if time.monotonic() >= end:
                raise ReplayTimeout(f"server (pid {self.pid}) did not answer within {timeout:g} s of its start: {_told(_lines(log)[-1:])}")
        raise error_of(process.returncode, _told(_lines(log)[-1:]).removeprefix("replay-server: "))


def _query(endpoints: Endpoints, timeout: float) -> dict[str, Any]:
    from replay_server_client.status import query

    return query(endpoints, timeout)


def _text(option: str, value: object) -> str:
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return ",".join(value)
    if isinstance(value, str | int | float | os.PathLike) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):  # an integer of more digits than Python prints
            text = str(value)
            if "\0" not in text:  # no argument of a command holds one
                return text
    raise InvalidRequest(f"{option}={shown(value)}: a text, a number or a list of texts")


def _lines(log: IO[bytes]) -> list[str]:
    """The lines at its end. The file's position is the server's, too, and stays where it is."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES)).decode(errors="replace").strip().splitlines()


def _told(lines: list[str]) -> str:
    return " | ".join(lines) or "it printed nothing"
