"""Waiting requests: who is granted, in which order, from which window."""

from __future__ import annotations

import random

import pytest
from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.messages import PROTOCOL_VERSION, Hello, Sample

from replay_server.flow import Flow
from replay_server.leases import Leases
from replay_server.requests import Requests, grant_of
from replay_server.ring import Ring
from replay_server.sessions import LearnerSession


def learner(token: int) -> LearnerSession:
    hello = Hello(PROTOCOL_VERSION, 1, "learner", f"l{token}", 1, 0, 0, None, None, 0, False, 0, None)
    return LearnerSession(token=token, identity=b"", hello=hello, ordinal=token, heard_s=0)


def sample(number: int, rows: int = 4, *, sampler: int = 0, min_committed: int = 0, max_age_rows: int | None = None) -> Sample:
    return Sample(1, 1, sampler, number, rows, min_committed, max_age_rows)


def ring_of(committed: int, capacity: int = 100) -> Ring:
    ring = Ring(capacity, committed + 1)
    if committed:
        ring.commit(ring.reserve(committed, None))
    return ring


@pytest.mark.parametrize("seed", range(20))
def test_exactly_the_requests_that_may_be_met_are_granted_in_the_order_asked(seed: int) -> None:
    rng = random.Random(seed)
    requests, leases, flow, ring = Requests(), Leases(1000), Flow(), Ring(50, 50)
    learners = [learner(token) for token in (1, 2, 3)]
    waiting: list[tuple[int, int, int]] = []  # (session, number, min_committed) in the order asked
    for now_ns in range(200):
        who, number = rng.choice(learners), rng.randint(1, 6)
        action = rng.random()
        if action < 0.5:
            wanted = rng.randint(0, 2 * ring.committed + 3)
            requests.ask(who, sample(number, min_committed=wanted), now_ns)
            index = next((i for i, (s, n, _) in enumerate(waiting) if (s, n) == (who.token, number)), None)
            if index is None:
                waiting.append((who.token, number, wanted))
            else:
                waiting[index] = (who.token, number, wanted)
        elif action < 0.6:
            requests.cancel(who.token, 0, number)
            waiting = [w for w in waiting if w[:2] != (who.token, number)]
        elif action < 0.65:
            requests.forget(who.token)
            waiting = [w for w in waiting if w[0] != who.token]
        elif ring.reserved < 150:
            ring.commit(ring.reserve(rng.randint(1, 5), None))
        expected = [w for w in waiting if ring.committed >= max(1, w[2])]
        granted = requests.grant(ring, flow, leases, now_ns)
        assert [(g.learner.token, g.lease.number) for g in granted] == [w[:2] for w in expected]
        assert all((g.lease.tail, g.lease.committed) == (ring.tail, ring.committed) for g in granted)
        waiting = [w for w in waiting if w not in expected]
        assert len(requests) == len(waiting)
        for lease in granted:
            leases.release(lease.lease.lease, lease.learner.token)


def test_asking_again_replaces_what_is_asked_and_keeps_the_place() -> None:
    requests, one, two = Requests(), learner(1), learner(2)
    requests.ask(one, sample(1, min_committed=99), 0)
    requests.ask(two, sample(1), 1)
    requests.ask(one, sample(1, rows=7), 2)
    granted = requests.grant(ring_of(10), Flow(), Leases(1000), 3)
    assert [(g.learner.token, g.lease.rows, g.asked_ns) for g in granted] == [(1, 7, 0), (2, 4, 1)]


def test_a_request_that_waits_lets_others_pass() -> None:
    requests = Requests()
    requests.ask(learner(1), sample(1, min_committed=11), 0)
    requests.ask(learner(2), sample(1), 1)
    assert [g.learner.token for g in requests.grant(ring_of(10), Flow(), Leases(1000), 2)] == [2]
    assert len(requests) == 1


def test_max_age_rows_narrows_the_window_but_not_the_lease() -> None:
    requests, leases, ring = Requests(), Leases(1000), ring_of(150, capacity=100)
    requests.ask(learner(1), sample(1, max_age_rows=20), 0)
    requests.ask(learner(1), sample(2, max_age_rows=1000), 0)
    young, old = requests.grant(ring, Flow(), leases, 0)
    assert [grant_of(g.lease, g.message).tail for g in (young, old)] == [130, 50]
    assert (young.lease.tail, young.lease.committed) == (50, 150)


def test_grants_count_as_sampled_rows_in_the_limiter() -> None:
    requests, flow = Requests(), Flow(0, 1.0, 10)
    for number in (1, 2, 3):
        requests.ask(learner(1), sample(number, rows=5), 0)
    granted = requests.grant(ring_of(10), flow, Leases(1000), 0)
    assert [g.lease.number for g in granted] == [1, 2]
    assert (flow.sampled, len(requests)) == (10, 1)


def test_a_learner_that_never_releases_does_not_starve_another() -> None:
    requests, leases, greedy, modest = Requests(), Leases(1000), learner(1), learner(2)
    ring = ring_of(10)
    for number in range(1, 101):
        requests.ask(greedy, sample(number), 0)
        requests.grant(ring, Flow(), leases, 0)
    assert leases.count_of(1) < 100
    requests.ask(modest, sample(1), 0)
    assert [g.learner.token for g in requests.grant(ring, Flow(), leases, 0)] == [2]


def test_waiting_requests_of_one_learner_are_bounded() -> None:
    requests, who = Requests(), learner(1)
    with pytest.raises(InvalidRequest, match="wait already"):
        for number in range(1, 1000):
            requests.ask(who, sample(number, min_committed=99), 0)
    assert len(requests) < 100
    requests.ask(learner(2), sample(1), 0)
