"""A bell between threads that a poll can hear: a pipe."""

from __future__ import annotations

import contextlib
import os


class Wake:
    """``ring`` makes ``fd`` readable until ``hush``; neither ever waits."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it rings already
            os.write(self._write, b"!")

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write)
