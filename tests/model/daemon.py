"""The server's own parts, brought to life from a state and put away again: ring, credits, leases, links, flow, requests, ingress.

Nothing of the protocol is written twice here. The one thing replaced is the ring's memory: its copies are queued in the state, and the
explorer decides when each of them happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
from model.states import Attached, CopyRows, Held, Server, Sizes, State, Ticket, WriteLinks
from replay_server_protocol.messages import Hello, Publish
from replay_server_protocol.segment import Segment as Mapping
from replay_server_protocol.states import SessionState

from replay_server.counters import Counters
from replay_server.credit import Credits
from replay_server.flow import Flow
from replay_server.ingress import Flight, Ingress, Published
from replay_server.leases import Lease, Leases
from replay_server.links import LinkedSpan
from replay_server.metadata import Metadata, Notes
from replay_server.requests import Requests, Waiting
from replay_server.ring import Ring, Span
from replay_server.sessions import CollectorSession, LearnerSession
from replay_server.storage import Copy, RingLayout, RingPlace, Write

_SEGMENT_BYTES = 1000  # a row is one byte, and session n's segment lies at n times this
SAMPLER = 0
ROWS = 1
"""Rows a batch: the gather reads the whole window, whatever would be drawn from it."""


class _Address(NamedTuple):
    address: int


class Stream:
    """The memory that ingress submits to: ``submit`` queues, ``completed`` counts the tickets of which nothing is left."""

    place = RingPlace("cpu", b"", None, 0)
    device_bytes = host_bytes = 0

    def __init__(self, tickets: tuple[Ticket, ...], layout: RingLayout, slot_rows: int) -> None:
        self.tickets = list(tickets)
        self._layout = layout
        self._slot_rows = slot_rows

    def register(self, segment: Mapping) -> str:
        raise NotImplementedError("the model's segments are registered from the start")

    def unregister(self, segment: Mapping) -> None: ...

    def close(self) -> None: ...

    def submit(self, copies: Sequence[Copy], writes: Sequence[Write] = ()) -> None:
        self.tickets.append((*map(self._copied, copies), *map(self._written, writes)))

    def completed(self) -> int:
        return next((done for done, ticket in enumerate(self.tickets) if ticket), len(self.tickets))

    def _copied(self, copy: Copy) -> CopyRows:
        session, place = divmod(copy.address, _SEGMENT_BYTES)
        return CopyRows(copy.offset, session, *divmod(place, self._slot_rows), copy.n_bytes)

    def _written(self, write: Write) -> WriteLinks:
        assert self._layout.link is not None
        return WriteLinks((write.offset - self._layout.link) // 8, tuple(np.frombuffer(write.content, np.int64).tolist()))


@dataclass(frozen=True)
class Parts:
    """What the server is made of; a mutation replaces one."""

    ring: type[Ring] = Ring
    credits: type[Credits] = Credits
    leases: type[Leases] = Leases
    flow: type[Flow] = Flow
    requests: type[Requests] = Requests
    ingress: type[Ingress] = Ingress
    stream: type[Stream] = Stream


AS_BUILT = Parts()


def _hello(role: str, lanes: int) -> Hello:
    return Hello(1, 1, cast(Any, role), role, 1, 1, 1, None, None, lanes, True, 0, None)


@dataclass
class Daemon:
    """The living parts of one state. ``server`` puts them away."""

    sizes: Sizes
    generation: int
    learners: tuple[int, ...]
    ring: Ring
    leases: Leases
    flow: Flow
    requests: Requests
    ingress: Ingress
    stream: Stream
    sessions: dict[int, CollectorSession] = field(default_factory=dict)

    @classmethod
    def of(cls, state: State, sizes: Sizes, parts: Parts) -> Daemon:
        server = state.server
        ring, leases = parts.ring(sizes.capacity, sizes.headroom), parts.leases(sizes.lease_ticks)
        ring.reserved, ring.committed = server.reserved, server.committed
        flow = parts.flow(0, sizes.samples_per_insert, sizes.tolerance, server.inserted, server.sampled, server.reserved - server.committed)
        layout = RingLayout.of(sizes.ring_rows, 1, has_link=sizes.has_links, has_priority=False)
        stream = parts.stream(state.device.stream, layout, sizes.slot_rows)
        metadata = Metadata([], Notes(has_episodes=False, has_versions=False), lambda mailbox: None)
        ingress = parts.ingress(ring, stream, layout, flow, leases, metadata, Counters())
        daemon = cls(sizes, server.generation, server.learners, ring, leases, flow, parts.requests(), ingress, stream)
        for attached in server.collectors:
            daemon.sessions[attached.session] = _thawed(attached, sizes, parts)
        daemon._thaw_queues(server)
        for held in server.leases:
            left = held.left
            lease = Lease(held.lease, held.session, SAMPLER, held.number, ROWS, held.tail, held.committed, left - sizes.lease_ticks, left)
            leases._open[held.lease] = lease
            leases._last = max(leases._last, held.lease)
        for request in server.requests:
            key = request.session, request.sampler, request.number
            daemon.requests._waiting[key] = Waiting(daemon.learner(request.session), request, 0)
        return daemon

    def learner(self, session: int) -> LearnerSession:
        return LearnerSession(token=session, identity=b"", hello=_hello("learner", 1), ordinal=0, heard_s=0.0, proof_step=3)

    def server(self) -> Server:
        """What these parts have come to. Sessions that ended and have nothing queued are forgotten."""
        sessions = [session for session in self.sessions.values() if session.state is not SessionState.ENDED or session.queued]
        is_limited = self.sizes.samples_per_insert is not None  # else nobody asks for these sums, and states would differ in them
        return Server(
            self.generation,
            tuple(map(_frozen, sessions)),
            self.learners,
            self.ring.reserved,
            self.ring.committed,
            tuple(published.message for published in self.ingress._queue),
            tuple((flight.published.message if flight.published else None, flight.span.first_seq) for flight in self.ingress._in_flight),
            tuple(Held(x.lease, x.session, x.number, x.tail, x.committed, x.deadline_ns) for x in self.leases._open.values()),
            tuple(waiting.message for waiting in self.requests._waiting.values()),
            self.flow.inserted if is_limited else 0,
            self.flow.sampled if is_limited else 0,
        )

    def tickets(self) -> tuple[Ticket, ...]:
        """The stream's tickets, without those that ingress has seen complete."""
        return tuple(self.stream.tickets[self.ingress._completed :])

    def _thaw_queues(self, server: Server) -> None:
        def published(message: Publish) -> Published:
            return Published(self.sessions[message.session], message, message.rows, 0)

        self.ingress._queue = deque(map(published, server.queue))
        for message, seq in server.in_flight:
            rows = 0 if message is None else message.rows
            self.ingress._in_flight.append(Flight(published(message) if message else None, Span(seq, rows), counted=rows))


def _thawed(attached: Attached, sizes: Sizes, parts: Parts) -> CollectorSession:
    session = CollectorSession(token=attached.session, identity=b"", hello=_hello("collector", sizes.lanes), ordinal=0, heard_s=0.0)
    session.state = SessionState.ENDED if attached.is_ended else SessionState.ATTACHED
    session.slot_rows = session.slot_bytes = sizes.slot_rows
    session.segment = cast(Mapping, _Address(_SEGMENT_BYTES * attached.session))
    session.credits = parts.credits(0)
    session.credits.slots = list(attached.slots)
    session.credits.taken, session.credits.credited = attached.taken, attached.credited
    session.queued = attached.queued
    session.published_rows, session.committed_rows = attached.published_rows, attached.committed_rows
    session.last_committed_seq = attached.last_committed_seq
    if attached.previous is not None:
        first_seq, links, last_offset, is_whole = attached.previous
        session.previous = LinkedSpan(first_seq, np.array(links, np.int64), np.array(last_offset, np.int64), is_whole)
    return session


def _frozen(session: CollectorSession) -> Attached:
    previous = session.previous
    return Attached(
        session.token,
        session.state is SessionState.ENDED,
        tuple(session.credits.slots),
        session.credits.taken,
        session.credits.credited,
        session.queued,
        session.published_rows,
        session.committed_rows,
        session.last_committed_seq,
        None
        if previous is None
        else (previous.first_seq, tuple(previous.links.tolist()), tuple(previous.last_offset.tolist()), previous.is_whole),
    )
