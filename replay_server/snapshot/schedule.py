"""Snapshots from time to time, each by a child process that attaches like any other client: the data path's thread only starts it."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from pathlib import Path

from replay_server_protocol.endpoints import Endpoints

log = logging.getLogger("replay_server")

_END_WITHIN_S = 2.0


class SnapshotSchedule:
    """One snapshot every ``every_s`` seconds, the first after so long; one that is still under way is not joined by a second."""

    def __init__(self, endpoints: Endpoints, directory: str, every_s: float, keep: int, now_s: float) -> None:
        self._every_s = every_s
        self._due_s = now_s + every_s
        self._began_s = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._command = [sys.executable, "-m", "replay_server", "snapshot", str(Path(directory)), "--keep", str(keep), "--background"]
        self._command += ["--name", endpoints.name, "--run-dir", str(endpoints.run_dir)]

    def tend(self, now_s: float, *, has_rows: bool) -> None:
        """Starts the next one when it is due, and tells how the last one ended. Never waits."""
        if self._child is not None and (status := self._child.poll()) is not None:
            self._child = None
            if status:
                log.error("a snapshot failed after %.1f s with exit code %d; the ones before it are whole", now_s - self._began_s, status)
        if now_s < self._due_s:
            return
        self._due_s = now_s + self._every_s
        if self._child is not None:
            log.warning("the snapshot begun %.0f s ago is still being written: none is begun now", now_s - self._began_s)
        elif has_rows:
            self._begin(now_s)

    def close(self) -> None:
        """Ends one that is under way: what it wrote is removed by the next."""
        child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_WITHIN_S)
            return
        child.kill()
        child.wait()

    def _begin(self, now_s: float) -> None:
        try:
            self._child = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        except OSError as error:
            log.error("a snapshot can't be begun: %s", error)
        self._began_s = now_s
