"""The server's log: lines to stderr, and never a wait for whoever reads them."""

from __future__ import annotations

import logging
import os
import select
import sys
from typing import TextIO

_LONGEST = 4000
"""A pipe that is ready takes PIPE_BUF bytes, 4096 on Linux, at once."""


def occupy_standard_streams() -> None:
    """Opens /dev/null in place of standard streams that were closed when the process was started.

    Else the next socket would get such a number, and whoever prints to stderr, libzmq among them, would write into it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


class LogLines(logging.StreamHandler[TextIO]):
    """Writes a line if the stream takes it now. Where nobody reads the other end of a full pipe it is left out, and the next line that
    goes says how many were: the data path's one thread must not sleep in a write."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream or sys.stderr)
        self.dropped = 0
        self._poll = select.poll()
        self._poll.register(self.stream, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        if not self._poll.poll(0):
            self.dropped += 1
            return
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        dropped, self.dropped = self.dropped, 0
        more = f" ({dropped} lines before this one were not read in time)" if dropped else ""
        return super().format(record)[:_LONGEST] + more
