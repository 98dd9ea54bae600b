"""The states of a session, a slot, a lease and a batch buffer, and the only moves between them.

Each table reads (state, event) -> state. A pair that isn't there is an error that names both and changes nothing. These tables know
neither side's sockets or memory; docs/design.md draws them. The enums are StrEnums for their hash: a move is on every slot's path.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import TypeVar

from replay_server_protocol.errors import ProtocolViolation

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class SessionState(StrEnum):
    """A client as the server sees it."""

    GREETED = "greeted"  # HELLO accepted, memory not yet mapped
    ATTACHED = "attached"  # may publish (collector) or ask for batches (learner)
    AWAY = "away"  # its connection is gone; it may come back
    ENDED = "ended"


class SessionEvent(StrEnum):
    MAPPED = "mapped"
    LOST = "lost"
    FOUND = "found"
    END = "end"


SESSION: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (SessionState.GREETED, SessionEvent.MAPPED): SessionState.ATTACHED,
    (SessionState.GREETED, SessionEvent.END): SessionState.ENDED,
    (SessionState.ATTACHED, SessionEvent.LOST): SessionState.AWAY,
    (SessionState.ATTACHED, SessionEvent.END): SessionState.ENDED,
    (SessionState.AWAY, SessionEvent.FOUND): SessionState.ATTACHED,
    (SessionState.AWAY, SessionEvent.END): SessionState.ENDED,
}


class SlotState(StrEnum):
    """A slot as its owner of the moment sees it: the collector holds FREE and OPEN ones, the server the others."""

    FREE = "free"  # the collector has its credit
    OPEN = "open"  # the collector writes rows into it
    PUBLISHED = "published"  # handed over, waiting for room in the ring
    COPYING = "copying"  # its span is reserved and its copy submitted


class SlotEvent(StrEnum):
    OPEN = "open"
    ABANDON = "abandon"  # an exception inside `with collector.slot()`: nothing was published
    PUBLISH = "publish"
    SUBMIT = "submit"
    CREDIT = "credit"


SLOT: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.OPEN): SlotState.OPEN,
    (SlotState.OPEN, SlotEvent.ABANDON): SlotState.FREE,
    (SlotState.OPEN, SlotEvent.PUBLISH): SlotState.PUBLISHED,
    (SlotState.PUBLISHED, SlotEvent.SUBMIT): SlotState.COPYING,
    (SlotState.PUBLISHED, SlotEvent.CREDIT): SlotState.FREE,  # the collector's side sees no SUBMIT
    (SlotState.COPYING, SlotEvent.CREDIT): SlotState.FREE,
}


class LeaseState(StrEnum):
    """A learner's hold on a window."""

    OPEN = "open"
    RELEASED = "released"
    REVOKED = "revoked"  # its deadline passed
    ORPHANED = "orphaned"  # its process was seen dead


class LeaseEvent(StrEnum):
    RELEASE = "release"
    DEADLINE = "deadline"
    DEATH = "death"


LEASE: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.OPEN, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.OPEN, LeaseEvent.DEADLINE): LeaseState.REVOKED,
    (LeaseState.OPEN, LeaseEvent.DEATH): LeaseState.ORPHANED,
}


class BufferState(StrEnum):
    """One of a sampler's prefetch + 1 batch buffers, in the learner."""

    FREE = "free"  # no queued work reads it
    REQUESTED = "requested"  # asked for at the server
    GATHERING = "gathering"  # lease open, gather queued
    READY = "ready"  # gather seen complete within the lease
    LENT = "lent"  # the caller's batch
    RETURNING = "returning"  # the caller's queued work may still read it


class BufferEvent(StrEnum):
    REQUEST = "request"
    GRANT = "grant"
    COMPLETE = "complete"
    LATE = "late"  # seen complete after the deadline: dropped, the same request number is asked again
    STALE = "stale"  # ready, but not what the call asks for
    TAKE = "take"
    RETURN = "return"
    IDLE = "idle"  # the work queued on the caller's stream is done
    FORGET = "forget"  # the server is gone


BUFFER: dict[tuple[BufferState, BufferEvent], BufferState] = {
    (BufferState.FREE, BufferEvent.REQUEST): BufferState.REQUESTED,
    (BufferState.REQUESTED, BufferEvent.GRANT): BufferState.GATHERING,
    (BufferState.REQUESTED, BufferEvent.FORGET): BufferState.FREE,
    (BufferState.GATHERING, BufferEvent.COMPLETE): BufferState.READY,
    (BufferState.GATHERING, BufferEvent.LATE): BufferState.FREE,
    (BufferState.GATHERING, BufferEvent.FORGET): BufferState.FREE,
    (BufferState.READY, BufferEvent.STALE): BufferState.FREE,
    (BufferState.READY, BufferEvent.FORGET): BufferState.FREE,
    (BufferState.READY, BufferEvent.TAKE): BufferState.LENT,
    (BufferState.LENT, BufferEvent.RETURN): BufferState.RETURNING,
    (BufferState.RETURNING, BufferEvent.IDLE): BufferState.FREE,
}


def move(table: dict[tuple[S, E], S], state: S, event: E) -> S:
    """The state after ``event``. Raises ProtocolViolation, naming both, if the table has no such move."""
    after = table.get((state, event))
    if after is None:
        raise ProtocolViolation(f"{type(state).__name__} {state.value}: {event.value} isn't allowed now")
    return after
