"""Learners' requests: which wait, and which may be granted now. Learners are served in the order in which they asked."""

from __future__ import annotations

from dataclasses import dataclass

from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.messages import Grant, Observe, Sample

from replay_server.flow import Flow, FlowState
from replay_server.leases import Lease, Leases
from replay_server.ring import Ring
from replay_server.sessions import LearnerSession

_MOST_WAITING = 64
_MOST_LEASES = 64


@dataclass(slots=True)
class Waiting:
    """A request that is not granted yet."""

    learner: LearnerSession
    message: Sample
    asked_ns: int


@dataclass(frozen=True, slots=True)
class Granted:
    """A request and the lease it was met with."""

    learner: LearnerSession
    lease: Lease
    message: Sample
    asked_ns: int


def grant_of(lease: Lease, request: Sample) -> Grant:
    """The answer to ``request``: draw from the lease's window, or from its newest rows when the request limits their age."""
    youngest = 0 if request.max_age_rows is None else lease.committed - request.max_age_rows
    tail = max(lease.tail, youngest)
    return Grant(request.session, request.generation, lease.sampler, lease.number, lease.lease, tail, lease.committed, lease.deadline_ns)


def observe(message: Observe, ring: Ring, leases: Leases, now_ns: int) -> Lease:
    """A lease on the window of this moment that counts no rows; the same again for a repeat, whose grant may be lost.

    Raises InvalidRequest when the client has as many leases open as it may have.
    """
    lease = leases.find(message.session, message.sampler, message.number)
    if lease is None and leases.count_of(message.session) >= _MOST_LEASES:
        raise InvalidRequest(f"{_MOST_LEASES} leases of this client are open, as many as it may have; release one")
    window = (ring.tail, ring.committed)
    return lease or leases.open(message.session, message.sampler, message.number, 0, window, now_ns)


def _waits_for(waiting: Waiting, ring: Ring, flow: Flow, leases: Leases) -> FlowState | None:
    message = waiting.message
    state = flow.sample_waits_for(message.rows, ring.committed, message.min_committed)
    if state is None and leases.count_of(waiting.learner.token) >= _MOST_LEASES:
        return FlowState.LEARNERS_WAIT_FOR_RELEASE
    return state


class Requests:
    """The waiting requests of all learners, by (session, sampler, number)."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int, int], Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def of(self, session: int) -> list[Waiting]:
        """A learner's waiting requests, oldest first."""
        return [waiting for (owner, _, _), waiting in self._waiting.items() if owner == session]

    def ask(self, learner: LearnerSession, message: Sample, now_ns: int) -> None:
        """Notes a request; the same one again replaces what it asks for and keeps its place.

        Raises InvalidRequest when too many of this learner wait already: memory stays bounded whatever a client sends.
        """
        key = (learner.token, message.sampler, message.number)
        known = self._waiting.get(key)
        if known is not None:
            known.message = message
            return
        if len(self.of(learner.token)) >= _MOST_WAITING:
            raise InvalidRequest(f"{_MOST_WAITING} requests of this learner wait already; ask again when one is granted")
        self._waiting[key] = Waiting(learner, message, now_ns)

    def oldest_of_each(self) -> list[Waiting]:
        """The oldest request of every learner that waits."""
        oldest: dict[int, Waiting] = {}
        for (owner, _, _), waiting in self._waiting.items():
            oldest.setdefault(owner, waiting)
        return list(oldest.values())

    @property
    def oldest(self) -> Waiting | None:
        """The request that was asked first."""
        return next(iter(self._waiting.values()), None)

    def blocked_by(self, ring: Ring, flow: Flow, leases: Leases) -> FlowState | None:
        """What the oldest request waits for; None when there is none or the next ``grant`` meets it."""
        oldest = self.oldest
        return None if oldest is None else _waits_for(oldest, ring, flow, leases)

    def cancel(self, session: int, sampler: int, number: int) -> None:
        self._waiting.pop((session, sampler, number), None)

    def forget(self, session: int) -> None:
        """Drops everything a session waits for."""
        for key in [key for key in self._waiting if key[0] == session]:
            del self._waiting[key]

    def grant(self, ring: Ring, flow: Flow, leases: Leases, now_ns: int) -> list[Granted]:
        """Opens a lease for every request that may be met now."""
        granted = []
        for key, waiting in list(self._waiting.items()):
            message = waiting.message
            if _waits_for(waiting, ring, flow, leases) is not None:
                continue
            del self._waiting[key]
            window = (ring.tail, ring.committed)
            lease = leases.open(waiting.learner.token, message.sampler, message.number, message.rows, window, now_ns)
            flow.sample(message.rows)
            granted.append(Granted(waiting.learner, lease, message, waiting.asked_ns))
        return granted
