"""The processes of a fault schedule: forked from the stage, seen through /proc, and what is known of each."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from replay_server_protocol.process import _read_stat
from support.fault_players import Page
from support.fault_schedules import Fault, Part

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(slots=True)
class Actor:
    """A process on the stage. ``part`` is None for the server."""

    name: str
    pid: int
    page: Page
    part: Part | None
    log: Path
    fault: Fault | None = None  # waits at a point
    place: int = -1  # of that fault
    is_alive: bool = True
    status: int | None = None
    stopped_until_s: float | None = None
    disturbed: list[tuple[float, float]] = field(default_factory=list)
    has_heir: bool = False  # a forked child that lives on

    def reap_nowait(self) -> bool:
        """True when it has ended by now."""
        if self.is_alive:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.is_alive, self.status = False, os.waitstatus_to_exitcode(status)
        return not self.is_alive

    def reap(self) -> None:
        """Waits for its end."""
        if self.is_alive:
            _, status = os.waitpid(self.pid, 0)
            self.is_alive, self.status = False, os.waitstatus_to_exitcode(status)

    def last_words(self) -> str:
        return f"{self.name} ended with {self.status}:\n{self.log.read_text('utf-8', 'replace')[-3000:]}"


def fork(main: Callable[[], int], log: Path) -> int:
    """Runs ``main`` in a child that writes to ``log``, leads a process group, and dies with this process; returns its pid.

    SIGUSR2 makes it write every thread's stack.
    """
    pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - nothing of this process may go on as the stage
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def adopt_orphans() -> None:
    """Children of this process's dead children become its own."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def state_of(pid: int) -> str:
    found = _read_stat(pid)
    return found[0] if found else "gone"


def weight_of(pid: int) -> tuple[int, int]:
    """Descriptors and threads."""
    return len(descriptors_of(pid)), len(os.listdir(f"/proc/{pid}/task"))


def descriptors_of(pid: int) -> list[str]:
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.append(f"{fd} -> {os.readlink(f'/proc/{pid}/fd/{fd}')}")
    return found


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]


def overlap(begin_s: float, end_s: float, intervals: list[tuple[float, float]]) -> float:
    """How much of [begin, end) the intervals cover together."""
    covered, at = 0.0, begin_s
    for a, b in sorted(intervals):
        a, b = max(a, at), min(b, end_s)
        if b > a:
            covered, at = covered + b - a, b
    return covered


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
