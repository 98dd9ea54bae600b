"""Signals that ask for a stop as something a poller can wait for. Made before the sockets are bound: one that comes early is not lost.

SIGTERM, SIGINT, and SIGHUP where it was not ignored at the start (nohup): its terminal is gone. SIGUSR1 and SIGUSR2 change nothing: batch
systems send them to every process of a job, to warn the script among them. SIGQUIT and SIGKILL end the process as a crash does.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType


class StopSignals:
    """Counts the signals that ask for a stop. ``fileno`` turns readable with each; the main thread only may make one."""

    def __init__(self) -> None:
        self._untaken = 0
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        self._stopping = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if hangs_up else (signal.SIGTERM, signal.SIGINT)
        for number in self._stopping:
            signal.signal(number, self._note)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)

    def fileno(self) -> int:
        return self._read_fd

    def take(self) -> int:
        """How many came since the last time."""
        if self._untaken:
            untaken, self._untaken = self._untaken, 0
            with contextlib.suppress(BlockingIOError):  # its byte may be gone: read with that of the signal before it
                os.read(self._read_fd, 512)
            return untaken
        return 0

    def ignore(self) -> None:
        """From here on another signal changes nothing: the process is about to end in good order."""
        for number in self._stopping:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._untaken += 1
