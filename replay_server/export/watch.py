"""Asks the server for its report again and again, in a thread of its own; an absent server is a look like any other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from replay_server_client.status import query
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ReplayError

from replay_server.export.reading import Report
from replay_server.export.record import Look, Record


class Watch:
    """Looks every ``interval_s``, waiting at most ``timeout_s`` for each answer, until ``stop``."""

    def __init__(self, endpoints: Endpoints, record: Record, interval_s: float, timeout_s: float) -> None:
        self._endpoints = endpoints
        self._record = record
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns once the thread has ended, after the question that is out."""
        self._is_stopped.set()
        self._thread.join(self._timeout_s + 1.0)

    def _run(self) -> None:
        next_s = time.monotonic()
        while not self._is_stopped.is_set():
            self._record.see(look(lambda: query(self._endpoints, self._timeout_s)))
            next_s = max(next_s + self._interval_s, time.monotonic())
            self._is_stopped.wait(next_s - time.monotonic())


def look(ask: Callable[[], Report]) -> Look:
    """One question: its report, or the words of its error."""
    try:
        report = ask()
    except ReplayError as error:
        return Look(time.time(), time.monotonic(), None, str(error))
    return Look(time.time(), time.monotonic(), report)
