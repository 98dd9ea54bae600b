"""A child held by SIGSTOP for the length of a block, and let go whatever happens in it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from support.processes import Child


@contextmanager
def frozen(child: Child) -> Iterator[None]:
    child.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        child.send_signal(signal.SIGCONT)
