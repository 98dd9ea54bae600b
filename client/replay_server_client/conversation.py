"""What a learner and its server say to each other: messages in, to whom they belong; messages out, from whoever has something to ask.

Knows no threads and never waits: the engine calls it, under its lock. The socket's descriptor tells of changes, not of contents, and
sending may use a change up: ``advance`` ends only when the socket was read empty after the last send.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from replay_server_protocol.errors import ProtocolViolation, ServerClosing, ServerGone
from replay_server_protocol.messages import (
    Challenge,
    Explain,
    Grant,
    Hello,
    Observe,
    Proof,
    Proved,
    Reason,
    Refused,
    RingAt,
    Sample,
    ServerMessage,
)

from replay_server_client.connection import Connection, error_of
from replay_server_client.mailbox import MailPoster
from replay_server_client.mapping import Ring
from replay_server_client.proven_ring import ProvenRing

ASK_AGAIN_NS = 1_000_000_000
"""A request without an answer for so long is repeated with its number."""
IDLE_NAP_S = 0.5
AT_REST_S = math.inf
"""The nap of who has asked for nothing and waits for nobody but the caller."""
LOOKOUT = 2**62
"""The ordinal of the requester that looks at rows: it shifts no sampler's."""

R = TypeVar("R", bound="Requester")


class Requester(Protocol):
    """What asks for leases."""

    def advance(self, now_ns: int) -> bool:
        """Moves on whatever can move without waiting. True if a message was sent."""

    def granted(self, grant: Grant) -> None: ...

    def refused(self, refused: Refused) -> None: ...

    def claim(self) -> Callable[[], None] | None:
        """Work of a gather for the calling thread to do outside the lock; None if there is none."""

    def forget(self) -> None:
        """The ring is about to be unmapped: finish what reads it and drop every view of it."""

    def nap_s(self) -> float:
        """How long nothing happens if no message comes; AT_REST_S where none is awaited either."""


class Conversation:
    """One learner's side.

    ``closing`` is set when the server said that it stops, until somebody raises it; ``reason`` once it has explained a wait.
    """

    def __init__(self, connection: Connection, proven: ProvenRing) -> None:
        self.connection = connection
        self.closing: ServerClosing | None = None
        self.reason: str | None = None
        self._proven = proven
        self._poster = MailPoster(connection)
        self._posted_in = 0
        self._requesters: dict[int, Requester] = {}

    @property
    def ring(self) -> Ring | None:
        """The ring; None until its mapping is proved, and again once the server is lost."""
        return self._proven.ring

    def proved_ring(self) -> Ring | None:
        """As ``ring``, but raises why the ring can't be mapped."""
        if self._proven.refusal is not None:
            raise self._proven.refusal
        return self.ring

    def register(self, make: Callable[[int], R], ordinal: int | None = None) -> R:
        """Adds the requester that ``make`` builds from its ordinal: the next one, for draws are keyed by it, or ``LOOKOUT``."""
        chosen = sum(known != LOOKOUT for known in self._requesters) if ordinal is None else ordinal
        requester = make(chosen)
        self._requesters[chosen] = requester
        return requester

    def advance(self) -> None:
        """Takes every message and sends what follows. A lost server's ring is unmapped; a closing server is told BYE after that."""
        if not self.connection.is_attached:
            return
        try:
            self._read()
            while self._move_on() and self._read():
                pass
        except ServerClosing as closing:
            self.let_go()
            self.connection.say_bye()
            self.closing = closing
        except ServerGone:
            self.let_go()

    def claim(self) -> Callable[[], None] | None:
        """The next work of a gather for the calling thread to do outside the lock; None if there is none."""
        return next((work for requester in self._requesters.values() if (work := requester.claim()) is not None), None)

    def let_go(self) -> None:
        """Finishes the work on the ring, drops every view of it and unmaps it."""
        for requester in self._requesters.values():
            requester.forget()
        self._proven.let_go()

    def nap_s(self) -> float:
        """How long nothing happens if no message comes; AT_REST_S where none is awaited either."""
        if not self.connection.is_attached or self.ring is None:
            return IDLE_NAP_S
        return min((requester.nap_s() for requester in self._requesters.values()), default=IDLE_NAP_S)

    def ask_reason(self, sampler: int, number: int) -> None:
        """Asks what is missing for a request, or for the ring as long as there is none."""
        self.reason = None
        session, generation = self.connection.session, self.connection.generation
        self.connection.send(Explain(session, generation, "ring" if self.ring is None else "sample", sampler, number))

    def begin_post(self) -> None:
        """The next ``posted`` starts a post of its own."""
        self._posted_in = 0

    def posted(self, name: str, arrays: Mapping[str, object]) -> int | None:
        """The version that the post became, None while it is under way; starts it, and again if its session was lost."""
        if self._posted_in != self.connection.session:
            self._poster.start(name, arrays)
            self._posted_in = self.connection.session
            self.advance()
        return self._poster.version if self.connection.is_attached else None

    def _read(self) -> bool:
        """Takes every message that is there. True if there was one."""
        has_read = False
        while (message := self.connection.receive_nowait()) is not None:
            self._take(message)
            has_read = True
        return has_read

    def _move_on(self) -> bool:
        """Moves every requester on. True if one of them sent a message."""
        if self.ring is None:
            return False  # the server takes no request before the mapping is proved
        now_ns = time.monotonic_ns()
        has_sent = False
        for requester in self._requesters.values():
            has_sent |= requester.advance(now_ns)
        return has_sent

    def _take(self, message: ServerMessage) -> None:
        match message:
            case Grant():
                self._requester(message.sampler).granted(message)
            case RingAt():
                self._proven.place(message)
            case Challenge():
                self._proven.prove(2)
            case Proved():
                self._proven.accept()
            case Reason():
                self.reason = message.text
            case Refused() if message.about in (Sample.__name__, Observe.__name__):
                self._requester(message.sampler).refused(message)
            case Refused() if message.about in (Hello.__name__, Proof.__name__):
                self._proven.refusal = error_of(message)
            case _:
                self._poster.accept(message)

    def _requester(self, ordinal: int) -> Requester:
        if ordinal not in self._requesters:
            raise ProtocolViolation(f"the server answers sampler {ordinal}, this learner has {len(self._requesters)}")
        return self._requesters[ordinal]
