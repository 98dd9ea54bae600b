"""Who a process is: its pid alone is not enough, since pids are used again."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

_SPIN_S = 300e-6
_SPIN_CORES = 8


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process by pid and start time (clock ticks after boot, ``/proc/PID/stat`` field 22; 0 where that is unknown)."""

    pid: int
    start_ticks: int

    @classmethod
    def current(cls) -> ProcessIdentity:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        return cls(pid, read_start_ticks(pid))

    def is_stopped(self) -> bool:
        """True while this very process is stopped: by SIGSTOP, a terminal or a debugger. False where that can't be seen."""
        fields = _read_stat(self.pid)
        return len(fields) > 19 and fields[0] in "Tt" and int(fields[19]) == self.start_ticks

    def is_alive(self) -> bool:
        """True while this very process exists, also when it is stopped; a zombie counts as dead."""
        if self.start_ticks == 0:
            return os.path.exists(f"/proc/{self.pid}")
        return read_start_ticks(self.pid) == self.start_ticks and not _is_zombie(self.pid)


def read_start_ticks(pid: int) -> int:
    """Start time of ``pid`` in clock ticks, or 0 when there is no such process or no ``/proc``."""
    fields = _read_stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def pid_namespace() -> int:
    """Inode of this process's PID namespace, or 0 where the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def spin_s() -> float:
    """Seconds that a wait on the data path looks again and again before it sleeps.

    Waking a sleeper takes 30 to 60 us, as long as a slot's copy. On few cores spinning would take the one that the other side needs: 0.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _SPIN_S if cores >= _SPIN_CORES else 0.0


def can_start_threads(count: int) -> bool:
    """Whether this process may have ``count`` more threads: libzmq ends the process where it can't start its own. Tries it; 0.2 ms."""
    is_over, started = threading.Event(), []
    try:
        for _ in range(count):
            thread = threading.Thread(target=is_over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        is_over.set()
        for thread in started:
            thread.join()
    return True


def _is_zombie(pid: int) -> bool:
    fields = _read_stat(pid)
    return bool(fields) and fields[0] == "Z"


def _read_stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the state on: the name before it may hold spaces and brackets."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []
