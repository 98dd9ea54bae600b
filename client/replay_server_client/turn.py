"""Whose turn a client is: sockets, slots and leases belong to one thread at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal

from replay_server_protocol.errors import InvalidRequest


class Turn:
    """Taken by the thread that waits in a client, until it waits no more; it is never waited for. One wait may lie in another."""

    def __init__(self, who: str) -> None:
        self.who = who
        self._taken: dict[Literal["by"], int] = {}  # a dict: setdefault is one step, between which no other thread comes

    @property
    def is_taken(self) -> bool:
        return bool(self._taken)

    def check(self) -> None:
        """Raises InvalidRequest, naming both threads, while another one has it."""
        thread = self._taken.get("by")
        if thread is not None and thread != threading.get_ident():
            raise self._refusal(thread)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The calling thread has it in this block. Raises as ``check``; of two threads that come at once one is refused."""
        me = threading.get_ident()
        is_within = self._taken.get("by") == me
        try:
            thread = self._taken.setdefault("by", me)
            if thread != me:
                raise self._refusal(thread)
            yield
        finally:
            if not is_within and self._taken.get("by") == me:
                self._taken.clear()

    def _refusal(self, thread: int) -> InvalidRequest:
        name = next((each.name for each in threading.enumerate() if each.ident == thread), str(thread))
        return InvalidRequest(
            f"thread {threading.current_thread().name!r} calls {self.who} while thread {name!r} waits in it: a client is "
            "for one thread at a time; connect another one here, or call in turn"
        )
