"""An operator's session: stop a server, or change what may be changed while it runs."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Literal, Self

from replay_server_protocol import messages
from replay_server_protocol.codec import is_text
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import InvalidRequest, ReplayTimeout, shown
from replay_server_protocol.messages import MAX_TEXT, PROTOCOL_VERSION, Done, Hello, Refused
from replay_server_protocol.process import ProcessIdentity, pid_namespace

from replay_server_client.connection import Connection, error_of
from replay_server_client.deadline import Deadline

_MAX_KEY = 64


class Admin:
    """Sends verbs to a running server; each waits for the server's answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._number = 0

    @classmethod
    def connect(cls, name: str | None = None, *, run_dir: str | os.PathLike[str] | None = None, timeout: float = 5.0) -> Self:
        """Opens a session; raises ServerGone if no server answers within ``timeout`` seconds."""
        connection = Connection(Endpoints.resolve(name, run_dir), _hello)
        try:
            connection.attach(Deadline(timeout))
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def set(self, key: str, value: str, *, timeout: float = 5.0) -> None:
        """Changes ``samples-per-insert`` (a number or "none") or ``tolerance``; raises InvalidRequest for anything else."""
        for what, text, most in (("key", key, _MAX_KEY), ("value", value, MAX_TEXT)):
            if not isinstance(text, str) or len(text) > most or not is_text(text):
                raise InvalidRequest(f"set: {what} {shown(text)} is no text of at most {most:,} characters")
        self._ask("set", key, value, timeout)

    def stop(self, *, timeout: float = 5.0) -> None:
        """Asks the server to stop in good order; returns when it has begun to."""
        self._ask("stop", "", "", timeout)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, verb: Literal["stop", "set"], key: str, value: str, timeout: float) -> None:
        deadline = Deadline(timeout)
        connection = self._connection
        self._number += 1
        connection.send(messages.Admin(connection.session, connection.generation, self._number, verb, key, value))
        while True:
            answer = connection.receive(deadline.remaining_s)
            if isinstance(answer, Done) and answer.number == self._number:
                return
            if isinstance(answer, Refused):
                raise error_of(answer)
            if deadline.has_passed:
                raise ReplayTimeout(f"no answer to {verb} within {timeout:g} s: {connection.why_silent()}")


def _hello(nonce: int) -> Hello:
    me = ProcessIdentity.current()
    return Hello(PROTOCOL_VERSION, nonce, "admin", "", me.pid, me.start_ticks, pid_namespace(), None, None, 0, False, 0, None)
