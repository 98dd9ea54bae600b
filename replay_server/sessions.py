"""The attached clients: who they are, what they hold, and when a session ends.

A session ends on BYE, on its process's death (pidfd), or when its connection has been gone for 10 s. Nothing of one session is ever used
again by another: a stopped process that comes back may still write into its old segment.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from replay_server_protocol.errors import AttachRefused
from replay_server_protocol.messages import Hello
from replay_server_protocol.process import ProcessIdentity
from replay_server_protocol.segment import Segment
from replay_server_protocol.states import SESSION, SessionEvent, SessionState, move

from replay_server.credit import Credits
from replay_server.episodes import EpisodeTally
from replay_server.links import LinkedSpan

GONE_AFTER_S = 10.0
PING_EVERY_S = 2.0


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One attached client. ``token`` names it in every message; ``identity`` is its ZeroMQ route."""

    token: int
    identity: bytes
    hello: Hello
    ordinal: int
    heard_s: float
    pinged_s: float = 0.0
    state: SessionState = SessionState.GREETED
    lost_since_s: float | None = None

    @property
    def name(self) -> str:
        return self.hello.name or f"{self.hello.role}-{self.ordinal}"

    @property
    def process(self) -> ProcessIdentity:
        return ProcessIdentity(self.hello.pid, self.hello.start_ticks)

    def happen(self, event: SessionEvent) -> None:
        self.state = move(SESSION, self.state, event)

    def __str__(self) -> str:
        return f"{self.hello.role} {self.name!r} (pid {self.hello.pid})"


@dataclass(frozen=True, slots=True)
class NonfiniteRow:
    """Where a collector saw NaN or infinity: ``row`` is its number among the rows placed in its session, from 0."""

    field: str
    row: int


@dataclass(slots=True, kw_only=True, eq=False)
class CollectorSession(Session):
    """A collector: its slots, its publishes and their sums. The segment is set when the ring exists."""

    slot_rows: int = 0
    slot_bytes: int = 0
    segment: Segment | None = None
    credits: Credits = field(default_factory=lambda: Credits(0))
    copied_as: str = ""
    queued: int = 0  # publishes taken and not yet committed
    published_rows: int = 0
    committed_rows: int = 0
    rejected_rows: int = 0
    masked_rows: int = 0
    nonfinite_rows: int = 0
    nonfinite: NonfiniteRow | None = None  # the last one told of
    tell_nonfinite_at_ns: int = 0  # no log line before that
    episodes: EpisodeTally = field(default_factory=EpisodeTally)
    last_committed_seq: int = 0
    previous: LinkedSpan | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class MappingSession(Session):
    """A client that maps the ring, and how far its mapping is proved."""

    pattern: bytes | None = None  # what its proof cell holds now
    proof_number: int = 0  # names its proof cell
    transport: str = ""  # how rows come to it; empty before its first proof
    proof_step: int = 0  # 0: not told of the ring, 1 and 2: patterns to read back, 3: proved

    @property
    def is_proved(self) -> bool:
        return self.proof_step == 3


@dataclass(slots=True, kw_only=True, eq=False)
class ObserverSession(MappingSession):
    """Whoever looks at rows without counting: neither flow control nor the learners' figures know of it."""

    reads: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class LearnerSession(MappingSession):
    """A learner, and what it drew: ``batches`` of so many ``rows`` that it released as used."""

    batches: int = 0
    rows: int = 0
    dropped: int = 0
    refundable_rows: int = 0  # released as used and not said to be unused since
    largest_batch_rows: int = 0


S = TypeVar("S", bound=Session)


class Sessions:
    """The living sessions by token."""

    def __init__(self, max_collectors: int, max_learners: int) -> None:
        self._limits = {"collector": max_collectors, "learner": max_learners, "admin": 16, "observer": 16}
        self._by_token: dict[int, Session] = {}
        self._opened = dict.fromkeys(self._limits, 0)
        self._last_ended: dict[str, tuple[Session, float]] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_token.values()))

    def __len__(self) -> int:
        return len(self._by_token)

    def of(self, kind: type[S]) -> list[S]:
        return [session for session in self._by_token.values() if isinstance(session, kind)]

    def get(self, token: int, identity: bytes) -> Session | None:
        """The session of a message, if it came by that session's own connection."""
        session = self._by_token.get(token)
        return session if session is not None and session.identity == identity else None

    def find(self, token: int) -> Session | None:
        """The living session of this token."""
        return self._by_token.get(token)

    def last_ended(self, role: str) -> tuple[Session, float] | None:
        """The session of that role that ended last, and when; None before the first."""
        return self._last_ended.get(role)

    def by_nonce(self, nonce: int, identity: bytes) -> Session | None:
        """The session a repeated HELLO has already opened."""
        return next((s for s in self._by_token.values() if s.hello.nonce == nonce and s.identity == identity), None)

    def open(self, identity: bytes, hello: Hello, now_s: float) -> Session:
        """Opens a session; raises AttachRefused when there are as many of its role as allowed."""
        role, limit = hello.role, self._limits[hello.role]
        if sum(session.hello.role == role for session in self._by_token.values()) >= limit:
            raised = f"raise --max-{role}s or close one" if role in ("collector", "learner") else "close one"
            raise AttachRefused(f"{limit} {role}s are attached, which is the limit; {raised}", limit=limit)
        kinds: dict[str, type[Session]] = {"collector": CollectorSession, "learner": LearnerSession, "observer": ObserverSession}
        kind = kinds.get(hello.role, Session)
        token = secrets.randbelow(2**63 - 1) + 1
        session = kind(token=token, identity=identity, hello=hello, ordinal=self._opened[hello.role], heard_s=now_s)
        self._opened[hello.role] += 1
        self._by_token[token] = session
        return session

    def end(self, session: Session, now_s: float) -> None:
        session.happen(SessionEvent.END)
        del self._by_token[session.token]
        self._last_ended[session.hello.role] = (session, now_s)
