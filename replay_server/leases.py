"""Leases: learners' holds on windows. Only a release by number, a deadline passed, or a death seen ends one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from replay_server_protocol.states import LEASE, LeaseEvent, LeaseState, move


@dataclass(slots=True)
class Lease:
    """A hold of ``session`` on the window [tail, committed) until ``deadline_ns``, to gather ``rows`` rows for a request, or 0 to look.

    ``counted_rows`` of them count as sampled: all, or none since samples per insert were changed.
    """

    lease: int
    session: int
    sampler: int
    number: int
    rows: int
    tail: int
    committed: int
    opened_ns: int
    deadline_ns: int
    state: LeaseState = LeaseState.OPEN
    counted_rows: int = 0


_REVOKED_KEPT = 1024


class Leases:
    """The open leases, in the order of opening: tails and deadlines rise along it, so the first one is the oldest in both."""

    def __init__(self, lease_ns: int) -> None:
        self.lease_ns = lease_ns
        self._open: dict[int, Lease] = {}
        self._revoked: deque[Lease] = deque(maxlen=_REVOKED_KEPT)
        self._last = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def oldest(self) -> Lease | None:
        return next(iter(self._open.values()), None)

    @property
    def oldest_tail(self) -> int | None:
        """What the ring's floor must respect."""
        oldest = self.oldest
        return oldest.tail if oldest else None

    @property
    def next_deadline_ns(self) -> int | None:
        oldest = self.oldest
        return oldest.deadline_ns if oldest else None

    def open(self, session: int, sampler: int, number: int, rows: int, window: tuple[int, int], now_ns: int) -> Lease:
        self._last += 1
        lease = Lease(self._last, session, sampler, number, rows, *window, now_ns, now_ns + self.lease_ns, counted_rows=rows)
        self._open[lease.lease] = lease
        return lease

    def count_no_more(self) -> None:
        """What was granted so far no longer counts as sampled, so there is nothing to refund."""
        for lease in (*self._open.values(), *self._revoked):
            lease.counted_rows = 0

    def find(self, session: int, sampler: int, number: int) -> Lease | None:
        """The open lease of a request, when its grant must be repeated."""
        return next((x for x in self._open.values() if (x.session, x.sampler, x.number) == (session, sampler, number)), None)

    def count_of(self, session: int) -> int:
        """How many leases a session has open."""
        return sum(lease.session == session for lease in self._open.values())

    def release(self, lease: int, session: int) -> Lease | None:
        """Ends the lease, or returns None when it is not this session's open one (revoked before, or never its own)."""
        found = self._open.get(lease)
        if found is None or found.session != session:
            return None
        return self._end(found, LeaseEvent.RELEASE)

    def take_revoked(self, lease: int, session: int) -> Lease | None:
        """A lease of this session that was revoked lately, once: its batch may have been complete in time, and its release late."""
        found = next((x for x in self._revoked if (x.lease, x.session) == (lease, session)), None)
        if found is not None:
            self._revoked.remove(found)
        return found

    def expire(self, now_ns: int) -> list[Lease]:
        """Ends every lease whose deadline has passed."""
        expired = self._end_all(lambda lease: lease.deadline_ns < now_ns, LeaseEvent.DEADLINE)
        self._revoked.extend(expired)
        return expired

    def orphan(self, session: int) -> list[Lease]:
        """Ends the leases of a process that was seen dead. A session that merely ends keeps its leases to their deadlines."""
        return self._end_all(lambda lease: lease.session == session, LeaseEvent.DEATH)

    def _end_all(self, is_due: Callable[[Lease], bool], event: LeaseEvent) -> list[Lease]:
        return [self._end(lease, event) for lease in list(self._open.values()) if is_due(lease)]

    def _end(self, lease: Lease, event: LeaseEvent) -> Lease:
        lease.state = move(LEASE, lease.state, event)
        del self._open[lease.lease]
        return lease
