"""An operator's session: stop a server, change what may be changed while it runs, or trace it and its clients."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal, Self

from replay_server_protocol import messages
from replay_server_protocol.codec import is_text
from replay_server_protocol.errors import InvalidRequest, ReplayError, ReplayTimeout, shown
from replay_server_protocol.messages import MAX_TEXT, Done, Refused, ServerMessage, TracePart
from replay_server_protocol.trace import Event, check_writable, save_together
from replay_server_protocol.trace_part import read_part

from replay_server_client.connection import Connection, error_of
from replay_server_client.deadline import Deadline
from replay_server_client.hello import attached, hello_of

Verb = Literal["stop", "set", "trace-start", "trace-stop"]

_MAX_KEY = 64
_PARTS_S = 2.0
"""For the server's own part, beside what the clients may take."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A process of a trace; ``left_out`` says why it has no spans in the file."""

    process: str
    pid: int
    spans: int = 0
    dropped: int = 0
    left_out: str = ""


class Admin:
    """Sends verbs to a running server; each waits for the server's answer.

    For one thread at a time: another one that calls meanwhile is refused by InvalidRequest, and in a forked child all are by ForkedClient.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._number = 0

    @classmethod
    def connect(cls, name: str | None = None, *, run_dir: str | os.PathLike[str] | None = None, timeout: float = 5.0) -> Self:
        """Opens a session; raises ServerGone if no server answers within ``timeout`` seconds."""
        return cls(attached(name, run_dir, partial(hello_of, "admin", ""), timeout, "admin"))

    def set(self, key: str, value: str, *, timeout: float = 5.0) -> None:
        """Changes ``samples-per-insert`` (a number or "none") or ``tolerance``; raises InvalidRequest for anything else."""
        for what, text, most in (("key", key, _MAX_KEY), ("value", value, MAX_TEXT)):
            if not isinstance(text, str) or len(text) > most or not is_text(text):
                raise InvalidRequest(f"set: {what} {shown(text)} is no text of at most {most:,} characters")
        self._ask("set", key, value, timeout)

    def stop(self, *, timeout: float = 5.0) -> None:
        """Asks the server to stop in good order; returns when it has begun to."""
        self._ask("stop", "", "", timeout)

    def trace_start(self, *, timeout: float = 5.0) -> None:
        """Switches tracing on in the server and its clients, also those that attach later. Raises InvalidRequest if it is on."""
        self._ask("trace-start", "", "", timeout)

    def trace_stop(self, path: str | os.PathLike[str], *, wait: float = 5.0, timeout: float = 5.0) -> list[Traced]:
        """Switches it off, and writes what all processes recorded into one file that https://ui.perfetto.dev opens, whole or not at all.

        Clients may take ``wait`` seconds; who has not handed in by then is named and left out: a collector answers at its next call.
        Raises InvalidRequest, with the trace still on, if none is or ``path`` can't be written; DiskFull, with the trace lost.
        """
        check_writable(path)
        parts: list[TracePart] = []

        def take(message: ServerMessage) -> None:
            if isinstance(message, TracePart) and message.number == self._number:
                parts.append(message)

        self._ask("trace-stop", "", f"{wait:g}", wait + _PARTS_S + timeout, take)
        run_dir, found, traces = self._connection.endpoints.run_dir, [], []
        for part in parts:
            traced = Traced(part.process, part.pid, left_out=part.left_out)
            if not traced.left_out:
                file = run_dir / os.path.basename(part.part)
                try:
                    events, (described,) = read_part(file)
                    traced = Traced(part.process, part.pid, described["spans"], described["dropped_spans"])
                    traces.append((events, [described]))
                except ReplayError as error:
                    traced = Traced(part.process, part.pid, left_out=str(error))
                with contextlib.suppress(OSError):
                    file.unlink()
            found.append(traced)
        missing: list[Event] = [{"process": t.process, "pid": t.pid, "spans": 0, "left_out": t.left_out} for t in found if t.left_out]
        save_together([*traces, ([], missing)], path)
        return found

    def close(self) -> None:
        """Says BYE. Safe to call twice; in a forked child it does nothing."""
        self._connection.turn.check()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, verb: Verb, key: str, value: str, timeout: float, take: Callable[[ServerMessage], None] | None = None) -> None:
        deadline = Deadline(timeout)
        connection = self._connection
        with connection.calling():
            self._number += 1
            connection.send(messages.Admin(connection.session, connection.generation, self._number, verb, key, value))
            while True:
                answer = connection.receive(deadline.remaining_s)
                if isinstance(answer, Done) and answer.number == self._number:
                    return
                if isinstance(answer, Refused):
                    raise error_of(answer)
                if answer is not None and take is not None:
                    take(answer)
                if deadline.has_passed:
                    raise ReplayTimeout(f"no answer to {verb} within {timeout:g} s: {connection.why_silent()}")
