"""Ends what a test run has started when the run itself is killed: a process of its own, which sees the end of a pipe.

```
pytest ── "+ pid" for each child, "- pid" once it has ended ──► reaper
pytest dies, by whatever signal ──► end of the pipe ──► to every process group left: SIGTERM, so that servers clean up; then SIGKILL
```
Groups, not processes: a child may have started others, and may be stopped. Run as a script it is the reaper, and imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_TERM_S = 4.0
"""A server lets its clients go for 2 s."""
_LOOK_AGAIN_S = 0.02


class Reaper:
    """Of one test run. It is told pids, each of which leads a process group of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # out of reach of what ends the run
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    def watch(self, pid: int) -> None:
        self._tell(f"+ {pid}")

    def forget(self, pid: int) -> None:
        self._tell(f"- {pid}")

    def close(self) -> None:
        """Returns once what was still watched has been ended."""
        self._pipe.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed, so nobody needs to know
            self._pipe.write(f"{line}\n".encode())
            self._pipe.flush()


def end_groups(leaders: Iterable[tuple[int, str]]) -> None:
    """By SIGTERM, and what is left then by SIGKILL. ``leaders``: pids, and when they started, so that no later process is taken for one."""
    groups = [pid for pid, started in leaders if _started(pid) in (started, "")]  # a group outlives its leader, and keeps its number
    for pid in groups:
        _signal(pid, signal.SIGTERM)
        _signal(pid, signal.SIGCONT)
    end = time.monotonic() + _TERM_S
    while any(_signal(pid, 0) for pid in groups) and time.monotonic() < end:
        time.sleep(_LOOK_AGAIN_S)
    for pid in groups:
        _signal(pid, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    """Whether there is such a group."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _main() -> None:
    watched: dict[int, str] = {}
    for line in sys.stdin:
        what, pid = line.split()
        if what == "+":
            watched[int(pid)] = _started(int(pid))
        else:
            watched.pop(int(pid), None)
    end_groups(watched.items())


if __name__ == "__main__":
    _main()
