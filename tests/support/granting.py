"""The server's side of a learner's session without sockets: a ring in a shared segment, and grants that the test holds back or spoils."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import pytest
from replay_server_client import conversation, deadline, engine, prefetch, sampler
from replay_server_client.connection import Connection
from replay_server_client.deadline import Deadline
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ServerClosing, ServerGone
from replay_server_protocol.messages import (
    Challenge,
    ClientMessage,
    Explain,
    Grant,
    Hello,
    Proof,
    Proved,
    Reason,
    Refused,
    Release,
    RingAt,
    Sample,
    ServerMessage,
    Welcome,
)
from replay_server_protocol.schema import Schema
from replay_server_protocol.segment import Segment, segment_name
from support.clock import FakeClock

M = TypeVar("M", bound=ClientMessage)

_ON_THE_CLOCK = (conversation, deadline, engine, prefetch, sampler)

SCHEMA = Schema.of(value="int64", extra=("float32", 3))
LEASE_NS = 500_000_000


class GrantingConnection(Connection):
    """Grants every request at once, with the window [tail, committed), unless ``holds`` or ``refusal`` says otherwise.

    Row ``seq`` of the ring holds ``value == seq``. ``sent`` is everything the client said; ``clock`` times the leases.
    """

    def __init__(self, clock: FakeClock, *, ring_rows: int = 64, capacity: int = 48, committed: int = 40) -> None:
        super().__init__(Endpoints(Path("/nowhere"), "fake"), _no_hello)
        self.clock = clock
        self.sent: list[ClientMessage] = []
        self.capacity = capacity
        self.committed = committed
        self.holds = False
        self.has_ring = True
        self.refusal: Refused | None = None
        self.lease_ns = LEASE_NS
        self.ends: Callable[[], ServerGone] | None = None
        self.attaches = 0
        self._inbox: deque[ServerMessage] = deque()
        self._leases = 0
        proof_offset = ring_rows * SCHEMA.stride
        self.segment = Segment.create(segment_name(secrets.token_hex(4), "ring"), proof_offset + 64)
        self.ring_at = RingAt(
            session=1,
            generation=1,
            storage="cpu",
            handle=self.segment.name.encode(),
            device_uuid=None,
            alloc_bytes=self.segment.n_bytes,
            ring_rows=ring_rows,
            capacity=capacity,
            schema=SCHEMA.to_wire(),
            link_offset=None,
            priority_offset=None,
            overlay_offset=None,
            proof_offset=proof_offset,
        )
        rows = self.segment.bytes[:proof_offset].reshape(ring_rows, SCHEMA.stride)
        SCHEMA["value"].view(rows)[:] = np.arange(ring_rows)

    def attach(self, deadline: Deadline) -> Welcome:
        self.attaches += 1
        self.ends = None
        self.welcome = Welcome(self.attaches, 1, 1, 0, 1, 0, "run", "serving", 5, 0, self.lease_ns)
        self._inbox.clear()
        self._leases = 0
        if self.has_ring:
            self.show_ring()
        return self.welcome

    def show_ring(self) -> None:
        self._inbox.append(self.ring_at._replace(session=self.session))

    def send(self, message: ClientMessage) -> None:
        self.sent.append(message)
        match message:
            case Proof(step=step, pattern=pattern):
                assert pattern == self.segment.bytes[self.ring_at.proof_offset :].tobytes()
                self.segment.bytes[self.ring_at.proof_offset :] = 7  # the second pattern
                self._inbox.append(Challenge(self.session, 1) if step == 1 else Proved(self.session, 1))
            case Sample() if self.refusal is not None:
                self._inbox.append(self.refusal._replace(sampler=message.sampler, number=message.number))
            case Sample() if not self.holds:
                self.grant(message)
            case Explain(what=what):
                self._inbox.append(Reason(self.session, 1, what, "need 10,000 rows, have 812"))

    def grant(self, message: Sample) -> None:
        if message.min_committed > self.committed:
            return
        self._leases += 1
        tail = max(0, self.committed - self.capacity)
        deadline_ns = self.clock.now_ns + self.lease_ns
        self._inbox.append(Grant(self.session, 1, message.sampler, message.number, self._leases, tail, self.committed, deadline_ns))

    def repeat(self, message: ServerMessage) -> None:
        self._inbox.append(message)

    def receive_nowait(self) -> ServerMessage | None:
        if self.ends is not None:
            error = self.ends()
            if not isinstance(error, ServerClosing):
                self.detach()
            raise error
        return self._inbox.popleft() if self._inbox else None

    def sleep(self, timeout_s: float, also: Iterable[int] = (), spin_s: float = 0.0) -> None:
        """Nothing will come while one thread tests: time passes."""
        self.clock.advance(timeout_s)

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.sent if isinstance(message, kind)]

    def releases(self) -> list[tuple[int, bool]]:
        return [(message.lease, message.is_used) for message in self.of(Release)]

    def asked(self) -> list[tuple[int, int]]:
        """(number, min_committed) of each SAMPLE."""
        return [(message.number, message.min_committed) for message in self.of(Sample)]

    def close(self) -> None:
        super().close()
        self.segment.unlink()
        self.segment.close()


def _no_hello(nonce: int) -> Hello:
    raise NotImplementedError


def tell_time(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    """To a learner's files ``clock`` is the time from now on, and a sleep moves it."""
    for module in _ON_THE_CLOCK:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, monotonic_ns=clock.monotonic_ns, sleep=clock.advance))
