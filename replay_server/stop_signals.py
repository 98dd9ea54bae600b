"""SIGTERM and SIGINT as something a poller can wait for. Made before the sockets are bound: a signal that comes early is not lost."""

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
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

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
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._untaken += 1
