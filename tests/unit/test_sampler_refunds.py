"""What a sampler says about batches that nobody had: the server counts as sampled what was handed out, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from replay_server_client.deadline import Deadline
from replay_server_client.engine import Engine
from replay_server_client.learner import Learner
from replay_server_client.request import Seeds
from replay_server_protocol.errors import ServerClosing
from replay_server_protocol.messages import Release, Unused
from support.clock import FakeClock
from support.granting import GrantingConnection, tell_time

Make = Callable[[int], Learner]
ROWS = 8


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrantingConnection]:
    clock = FakeClock()
    tell_time(monkeypatch, clock)
    server = GrantingConnection(clock)
    yield server
    server.segment.unlink()


@pytest.fixture
def make(server: GrantingConnection) -> Iterator[Make]:
    made: list[Learner] = []

    def make(prefetch: int) -> Learner:
        driver = Engine(server, "cpu", None)
        driver.attach(Deadline(1))
        made.append(Learner(driver, Seeds(1, "learner"), prefetch))
        return made[-1]

    yield make
    for learner in made:
        learner.close()


def unused_rows(server: GrantingConnection) -> list[int]:
    return [message.rows for message in server.of(Unused)]


def handed_out(server: GrantingConnection) -> int:
    """Rows that count as sampled, as the server sees it."""
    return ROWS * sum(is_used for _, is_used in server.releases()) - sum(unused_rows(server))


def test_a_ready_batch_that_is_too_old_for_the_call_is_said_to_be_unused(make: Make, server: GrantingConnection) -> None:
    learner = make(1)
    learner.sample(ROWS)
    learner.progress()
    server.committed = 45
    assert learner.sample(ROWS, min_committed=45).window[1] == 45
    assert unused_rows(server) == [ROWS]
    learner.close()
    assert handed_out(server) == 2 * ROWS


def test_a_ready_batch_that_is_older_than_expected_is_said_to_be_unused_once(make: Make, server: GrantingConnection) -> None:
    learner = make(2)
    request = learner.sampler(ROWS)
    request.sample()
    learner.progress()
    server.committed = 45
    request.expect(45)
    assert unused_rows(server) == [ROWS, ROWS]
    request.expect(45)
    for _ in range(3):
        request.sample()
    assert unused_rows(server) == [ROWS, ROWS]


def test_what_was_prefetched_is_said_to_be_unused_when_the_learner_closes(make: Make, server: GrantingConnection) -> None:
    learner = make(2)
    for _ in range(4):
        learner.sample(ROWS)
        learner.progress()
    learner.close()
    assert handed_out(server) == 4 * ROWS


def test_a_learner_without_prefetch_has_nothing_to_refund(make: Make, server: GrantingConnection) -> None:
    learner = make(0)
    for _ in range(4):
        learner.sample(ROWS)
    learner.close()
    assert unused_rows(server) == []
    assert handed_out(server) == 4 * ROWS


def test_a_lost_session_is_refunded_nothing_by_the_next_one(make: Make, server: GrantingConnection) -> None:
    learner = make(1)
    learner.sample(ROWS)
    learner.progress()
    server.detach()
    learner.sample(ROWS)
    learner.sample(ROWS)
    assert server.attaches == 2
    assert unused_rows(server) == []


def test_a_closing_server_is_told_what_nobody_will_have(make: Make, server: GrantingConnection) -> None:
    learner = make(1)
    learner.sample(ROWS)
    learner.progress()
    server.ends = lambda: ServerClosing("closing")
    learner.progress()
    with pytest.raises(ServerClosing):
        learner.sample(ROWS)
    assert unused_rows(server) == [ROWS]
    assert server.sent.index(server.of(Unused)[0]) > server.sent.index(server.of(Release)[-1])


def test_batches_are_asked_for_in_the_order_in_which_they_are_handed_out(make: Make, server: GrantingConnection) -> None:
    learner = make(1)
    learner.sample(ROWS)
    learner.sample(ROWS)
    learner.progress()
    learner.sample(ROWS)
    learner.sample(ROWS)  # both batch buffers came free at once, the second one's turn is next
    numbers = [number for number, _ in server.asked()]
    assert numbers == sorted(numbers)
