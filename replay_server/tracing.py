"""A trace of a running server and its clients: who was told to record, who has handed in, and the answer to the operator.

```
off ──trace-start──► on ──trace-stop──► collecting ──all have handed in, or their time is over──► off
```
Each process writes a part into the run directory; the operator's command reads them, writes one file and removes them. This side knows
messages and file names only: no span passes through the control socket.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import InvalidRequest, ReplayError
from replay_server_protocol.messages import Done, ServerMessage, Traced, TraceOff, TraceOn, TracePart
from replay_server_protocol.process import ProcessIdentity
from replay_server_protocol.trace import Trace
from replay_server_protocol.trace_part import PartWriter

from replay_server.sessions import Session

LIVE_SPANS = 100_000
"""Of each process: some 40 MB of its memory when full, and 8 MB of the run directory."""
LONGEST_WAIT_S = 600.0
_MOST_OF_THE_PAST = 32
"""Clients that said bye while the trace was on, whose parts are kept."""


@dataclass(slots=True)
class Part:
    """What became of one process's spans: ``left_out`` says why there are none."""

    process: str
    pid: int
    path: Path
    left_out: str = ""

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


@dataclass(slots=True)
class Collection:
    """A ``trace-stop`` under way: whom to answer, until when, and the server's own part."""

    asker: Session
    request: int
    wait_s: float
    ends_s: float
    own: PartWriter | None
    own_part: Part


class Tracing:
    """``trace`` is where the server records now, or None: the one of ``--trace``, if there is one, else one made while a trace is on."""

    def __init__(self, endpoints: Endpoints, generation: int, own: Trace | None, send: Callable[[Session, ServerMessage], bool]) -> None:
        self.trace = own
        self.since_s: float | None = None  # while a trace is on
        self._own = own
        self._endpoints = endpoints
        self._generation = generation
        self._send = send
        self._number = 0
        self._parts_named = 0
        self._clients: dict[int, Part] = {}  # told and not heard of yet, by session
        self._late: dict[int, Part] = {}  # given up, and still alive
        self._past: deque[Part] = deque()
        self._collection: Collection | None = None
        self._since_ns = 0
        self.sweep()

    @property
    def is_collecting(self) -> bool:
        return self._collection is not None

    def start(self, sessions: list[Session]) -> None:
        """Begins to record here and tells every client. Raises InvalidRequest if a trace is on."""
        if self._collection is not None:
            raise InvalidRequest("the trace before this one is being collected; try again in some seconds")
        if self.since_s is not None:
            for_s = time.monotonic() - self.since_s
            raise InvalidRequest(f"a trace has been on for {for_s:.0f} s; `replay-server trace stop FILE` ends it and writes it")
        self._number += 1
        self._since_ns = Trace.now_ns()
        self.since_s = time.monotonic()
        self.trace = self._own or Trace(f"replay-server {self._endpoints.name}", max_spans=LIVE_SPANS)
        for session in sessions:
            self.tell(session)

    def tell(self, session: Session) -> None:
        """Tells a client that a trace is on, if one is; also one that attaches later."""
        if self.since_s is None or session.hello.role == "admin":
            return
        part = self._clients[session.token] = self._part(f"{session.hello.role} {session.name}", session.hello.pid)
        self._send(session, TraceOn(session.token, self._generation, self._number, LIVE_SPANS, part.path.name))

    def stop(self, asker: Session, request: int, wait_s: str, sessions: list[Session]) -> None:
        """Ends recording and begins to collect; ``step`` answers. Raises InvalidRequest if no trace is on."""
        if self._collection is not None:
            raise InvalidRequest("another `trace stop` is collecting")
        if self.since_s is None or self.trace is None:
            raise InvalidRequest("no trace is on; `replay-server trace start` begins one")
        limit_s = _seconds(wait_s)
        own_part = self._part(self.trace.process, ProcessIdentity.current().pid)
        own = PartWriter(own_part.path, self.trace, self._since_ns)
        self._collection = Collection(asker, request, limit_s, time.monotonic() + limit_s, own, own_part)
        self.since_s, self.trace = None, self._own
        for session in sessions:
            if session.token in self._clients:
                self._send(session, TraceOff(session.token, self._generation, self._number))

    def take(self, session: Session, message: Traced) -> None:
        """A client has written its part, or says why not. One that comes too late is removed."""
        part = self._clients.pop(session.token, None) if message.number == self._number else None
        if part is None:
            late = self._late.pop(session.token, None)
            if late is not None:
                late.remove()
            return
        part.left_out = message.error
        self._keep(part)

    def ended(self, session: Session) -> None:
        """A session is over: what it had not handed in by then is lost."""
        part = self._clients.pop(session.token, None)
        late = self._late.pop(session.token, None)
        if late is not None:
            late.remove()
        if part is not None:
            part.remove()
            part.left_out = "it ended, or was lost, before it could hand in"
            self._keep(part)

    def step(self, now_s: float) -> bool:
        """Writes a piece of the server's part, and answers the operator once all is there or time is up. True if it got something done."""
        collection = self._collection
        if collection is None:
            return False
        if collection.own is not None:
            try:
                if collection.own.write_piece():
                    collection.own = None
            except ReplayError as error:
                collection.own, collection.own_part.left_out = None, str(error)
            return True
        if self._clients and now_s < collection.ends_s:
            return False
        self._answer(collection)
        return True

    def sweep(self) -> None:
        """Removes parts that nobody came for, also a killed predecessor's."""
        pattern = re.compile(re.escape(self._endpoints.name) + r"\.trace-\d+-\d+")
        with contextlib.suppress(OSError):
            for path in self._endpoints.run_dir.iterdir():
                if pattern.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def report(self) -> dict[str, object]:
        state = "collecting" if self._collection else "off" if self.since_s is None else "on"
        for_s = None if self.since_s is None else time.monotonic() - self.since_s
        return {"state": state, "on_for_s": for_s, "clients_waited_for": len(self._clients) if self._collection else 0}

    def _answer(self, collection: Collection) -> None:
        for token, part in self._clients.items():
            part.left_out = f"no answer within {collection.wait_s:g} s: it answers at its next call, or it is stopped"
            self._late[token] = Part(part.process, part.pid, part.path)
        parts = [collection.own_part, *self._past, *self._clients.values()]
        self._collection = None
        self._clients.clear()
        self._past.clear()
        asker, generation = collection.asker, self._generation
        for part in parts:
            name = "" if part.left_out else part.path.name
            self._send(asker, TracePart(asker.token, generation, collection.request, part.process, part.pid, name, part.left_out))
        if not self._send(asker, Done(asker.token, generation, collection.request, len(parts))):
            for part in parts:
                part.remove()

    def _keep(self, part: Part) -> None:
        self._past.append(part)
        if self._collection is None and len(self._past) > _MOST_OF_THE_PAST:
            self._past.popleft().remove()

    def _part(self, process: str, pid: int) -> Part:
        self._parts_named += 1
        path = self._endpoints.run_dir / f"{self._endpoints.name}.trace-{self._generation}-{self._parts_named}"
        return Part(process, pid, path)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= LONGEST_WAIT_S:
        raise InvalidRequest(f"--wait {text}: 0 to {LONGEST_WAIT_S:g} seconds")
    return found
