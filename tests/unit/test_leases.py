"""Leases against a plain list, and the three ways in which one ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.states import LEASE, LeaseEvent, LeaseState, move

from replay_server.leases import Lease, Leases

LEASE_NS = 500
SESSIONS = st.integers(1, 3)


class LeasesAgainstAList(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.leases = Leases(LEASE_NS)
        self.open: list[Lease] = []
        self.now_ns, self.tail, self.number = 1000, 0, 0

    @rule(session=SESSIONS, rows=st.integers(1, 9), later_ns=st.integers(0, 300), moved=st.integers(0, 5))
    def grant(self, session: int, rows: int, later_ns: int, moved: int) -> None:
        self.now_ns += later_ns
        self.tail += moved
        self.number += 1
        lease = self.leases.open(session, 0, self.number, rows, (self.tail, self.tail + 10), self.now_ns)
        assert lease.deadline_ns == self.now_ns + LEASE_NS
        assert lease.lease not in {other.lease for other in self.open}
        self.open.append(lease)

    @rule(which=st.integers(0, 50), session=SESSIONS)
    def release(self, which: int, session: int) -> None:
        number = self.open[which % len(self.open)].lease if self.open else which
        owned = next((x for x in self.open if x.lease == number and x.session == session), None)
        assert self.leases.release(number, session) is owned
        if owned is not None:
            assert owned.state is LeaseState.RELEASED
            self.open.remove(owned)
            assert self.leases.release(number, session) is None, "a lease ends once"

    @rule(later_ns=st.integers(0, 700))
    def expire(self, later_ns: int) -> None:
        self.now_ns += later_ns
        due = [lease for lease in self.open if lease.deadline_ns < self.now_ns]
        assert self.leases.expire(self.now_ns) == due
        assert all(lease.state is LeaseState.REVOKED for lease in due)
        self.open = [lease for lease in self.open if lease not in due]

    @rule(session=SESSIONS)
    def die(self, session: int) -> None:
        mine = [lease for lease in self.open if lease.session == session]
        assert self.leases.orphan(session) == mine
        assert all(lease.state is LeaseState.ORPHANED for lease in mine)
        self.open = [lease for lease in self.open if lease.session != session]

    @invariant()
    def answers_agree(self) -> None:
        assert len(self.leases) == len(self.open)
        assert self.leases.oldest_tail == min((lease.tail for lease in self.open), default=None)
        assert self.leases.next_deadline_ns == min((lease.deadline_ns for lease in self.open), default=None)
        for session in (1, 2, 3):
            assert self.leases.count_of(session) == sum(lease.session == session for lease in self.open)
        for lease in self.open:
            assert self.leases.find(lease.session, lease.sampler, lease.number) is lease


TestLeasesAgainstAList = LeasesAgainstAList.TestCase


def test_a_lease_stands_until_its_deadline_has_passed_not_until_it_is_reached() -> None:
    leases = Leases(LEASE_NS)
    lease = leases.open(1, 0, 1, 4, (0, 10), 0)
    assert leases.expire(LEASE_NS) == []
    assert leases.expire(LEASE_NS + 1) == [lease]


def test_only_its_own_session_releases_a_lease() -> None:
    leases = Leases(LEASE_NS)
    lease = leases.open(1, 0, 1, 4, (0, 10), 0)
    assert leases.release(lease.lease, session=2) is None
    assert leases.oldest_tail == 0


@pytest.mark.parametrize("event", LeaseEvent)
def test_an_ended_lease_never_ends_again(event: LeaseEvent) -> None:
    for state in set(LeaseState) - {LeaseState.OPEN}:
        with pytest.raises(ProtocolViolation):
            move(LEASE, state, event)


def test_leases_of_one_request_are_found_by_session_sampler_and_number() -> None:
    leases = Leases(LEASE_NS)
    lease = leases.open(1, 2, 3, 4, (0, 10), 0)
    assert leases.find(1, 2, 3) == replace(lease)
    assert leases.find(2, 2, 3) is leases.find(1, 1, 3) is leases.find(1, 2, 4) is None
