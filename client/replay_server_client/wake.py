"""A bell between threads that a poll can hear: a pipe."""

from __future__ import annotations

import contextlib
import os
import time

_NEVER = 2**63


class Wake:
    """``ring`` makes ``fd`` readable until ``hush``, if somebody listens; neither ever waits.

    Who is about to sleep calls ``listen``, then looks whether there is something to do, then sleeps; who rings has made the change before.
    In this order no change is slept over, and a bell that nobody would hear costs no system call.

    A bell may be rung for later: until ``begin_ns``, the earliest of those not taken yet, who was woken may rest, on the same ``fd``.
    A bell for a time before that ends the rest. It may say, too, when the next one will be for: who wakes by then of its own accord needs
    no bell, and the one who rings pays for none (a system call, and on a virtual machine 10 us to wake another core).
    """

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        self._is_heard = False
        self._is_rung = False
        self._until_ns = _NEVER
        self.begin_ns = 0
        self.next_ns = 0

    def listen(self, until_ns: int = 0) -> None:
        """For every bell; with ``until_ns``, when the listener wakes of its own accord, for those for a time before that."""
        self._is_heard, self._is_rung, self._until_ns = True, False, until_ns or _NEVER

    def ring(self, begin_ns: int = 0, next_ns: int = 0) -> None:
        is_rest, is_sooner = time.monotonic_ns() < self.begin_ns, begin_ns < self.begin_ns
        self.next_ns = next_ns
        if is_sooner or not (is_rest or self._is_rung):
            self.begin_ns = begin_ns
        self._is_rung = True
        if (self._is_heard and begin_ns < self._until_ns) or (is_rest and is_sooner):
            self._is_heard = False  # it rings until it is hushed
            with contextlib.suppress(BlockingIOError):
                os.write(self._write, b"!")

    def hush(self) -> None:
        """Every bell so far is taken: who listened knows of it."""
        self._is_heard = self._is_rung = False
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write)
