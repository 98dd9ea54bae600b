"""The run directory of one server: made private, locked before any socket is bound, swept of a dead predecessor, left empty."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import AlreadyServing, InvalidRequest
from replay_server_protocol.process import ProcessIdentity
from replay_server_protocol.segment import sweep_segments

log = logging.getLogger("replay_server")


@dataclass(frozen=True, slots=True)
class RingHolder:
    """A learner that mapped the ring of ``generation``; its mapping may outlive that server."""

    pid: int
    start_ticks: int
    name: str
    generation: int

    def is_alive(self) -> bool:
        return ProcessIdentity(self.pid, self.start_ticks).is_alive()


class RunDirectory:
    """Holds the lock of one server name. ``generation`` rises from one server life to the next; ``run_id`` names this life's segments."""

    def __init__(self, endpoints: Endpoints, lock_fd: int, generation: int, is_made_here: bool) -> None:
        self.endpoints = endpoints
        self.generation = generation
        self.run_id = secrets.token_hex(4)
        self.swept: list[str] = []
        self.earlier_holders: list[RingHolder] = []
        self._lock_fd = lock_fd
        self._is_made_here = is_made_here

    @classmethod
    def claim(cls, endpoints: Endpoints) -> RunDirectory:
        """Takes the name, sweeping what a killed server of that name left.

        Raises AlreadyServing if a living server holds it, InvalidRequest if the directory is not ours alone.
        """
        is_made_here = _make_private(endpoints)
        fd = _lock(endpoints)
        last = read_record(endpoints.lock_path)
        claimed = cls(endpoints, fd, max(int(time.time() * 1000), _int(last.get("generation")) + 1), is_made_here)
        last_run = last.get("run_id")
        if isinstance(last_run, str) and last_run.isalnum():
            claimed.swept = sweep_segments(last_run)
        claimed.earlier_holders = [holder for holder in read_holders(endpoints) if holder.is_alive()]
        try:
            claimed._sign(fd)
        except InvalidRequest:
            claimed.release()
            raise
        return claimed

    def is_held(self) -> bool:
        """Whether the lock file is still the one that this server holds: somebody may have removed it, and another server made its own."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._lock_fd), os.stat(self.endpoints.lock_path))
        return False

    def claim_again(self) -> None:
        """Makes directory and lock again where they were removed. Raises AlreadyServing if another server has the name by now."""
        self._is_made_here |= _make_private(self.endpoints)
        fd = _lock(self.endpoints)
        try:
            self._sign(fd)
        except InvalidRequest:
            os.close(fd)
            raise
        os.close(self._lock_fd)
        self._lock_fd = fd

    def living_earlier_holders(self) -> list[RingHolder]:
        """Learners of earlier lives that still run: they may keep an old ring's memory."""
        self.earlier_holders = [holder for holder in self.earlier_holders if holder.is_alive()]
        return self.earlier_holders

    def note_holders(self, holders: Iterable[RingHolder]) -> None:
        """Writes down who maps the ring, for the next server of this name."""
        path, beside = self.endpoints.learners_path, self._unfinished_learners_path
        try:
            beside.write_text(json.dumps([asdict(holder) for holder in holders]), "utf-8")
            beside.replace(path)
        except OSError as error:
            log.warning("%s can't be written (%s): the next server will not know who holds this ring", path, error.strerror)

    @property
    def _unfinished_learners_path(self) -> Path:
        """Stays where the disk was full."""
        return self.endpoints.learners_path.with_suffix(".learners-new")

    def release(self) -> None:
        """Removes every file of this server, and the directory if this life made it and nobody else uses it, and gives the name up."""
        self.swept += sweep_segments(self.run_id)
        if self.is_held():  # else they are those of another server of this name
            ours = self.endpoints.learners_path, self._unfinished_learners_path, self.endpoints.lock_path
            for path in (self.endpoints.control_path, self.endpoints.status_path, *ours):
                with contextlib.suppress(OSError):  # somebody may have made a directory of its name: the server's end is in good order
                    path.unlink()
        os.close(self._lock_fd)
        if self._is_made_here:
            with contextlib.suppress(OSError):  # another server's files are in it
                self.endpoints.run_dir.rmdir()

    def _sign(self, lock_fd: int) -> None:
        me = ProcessIdentity.current()
        entry = {"pid": me.pid, "start_ticks": me.start_ticks, "run_id": self.run_id, "generation": self.generation}
        try:
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, json.dumps(entry).encode(), 0)
        except OSError as error:
            raise _no_lock(self.endpoints, error) from error


def _make_private(endpoints: Endpoints) -> bool:
    """Makes the run directory, or checks the one there is. True if it is new."""
    run_dir = endpoints.run_dir
    try:
        run_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        run_dir.mkdir(mode=0o700)
        return True
    except FileExistsError:
        _check_private(run_dir)
        return False
    except OSError as error:
        raise InvalidRequest(f"run directory {run_dir} can't be made: {error.strerror}; choose another --run-dir") from error


def _check_private(run_dir: Path) -> None:
    try:
        status = os.lstat(run_dir)
    except OSError as error:  # removed since it was seen
        raise InvalidRequest(f"run directory {run_dir} can't be looked at: {error.strerror}; choose another --run-dir") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise InvalidRequest(f"run directory {run_dir} must be a directory of uid {os.getuid()}; choose another --run-dir")
    if status.st_mode & 0o077:
        mode = f"{status.st_mode & 0o777:o}"
        raise InvalidRequest(f"run directory {run_dir} is open to other users (mode {mode}): chmod 700 it, or choose another")


def _lock(endpoints: Endpoints) -> int:
    while True:
        try:
            fd = os.open(endpoints.lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _no_lock(endpoints, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            holder = read_record(endpoints.lock_path).get("pid", "unknown")
            raise AlreadyServing(
                f"server {endpoints.name!r} (pid {holder}) already serves in {endpoints.run_dir}; stop it, or choose another --name"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(endpoints.lock_path)):
                return fd
        os.close(fd)  # its last holder removed the file between our open and our lock: take the new one


def _no_lock(endpoints: Endpoints, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"lock {endpoints.lock_path} can't be written: {error.strerror}; free space there, or choose another --run-dir")


def read_record(path: os.PathLike[str]) -> dict[str, object]:
    """What a lock file says of its holder: pid, start_ticks, run_id, generation; empty when it says nothing."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.loads(file.read(65536))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_holders(endpoints: Endpoints) -> list[RingHolder]:
    """The learners that mapped a ring of this name, as its last server wrote them down; some may be gone."""
    try:
        found = json.loads(endpoints.learners_path.read_text("utf-8"))
        return [RingHolder(int(x["pid"]), int(x["start_ticks"]), str(x["name"]), int(x["generation"])) for x in found]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0
