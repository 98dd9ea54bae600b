"""The server's mailboxes: whole versions, the newest wins, no segment outlives its last reader."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from replay_server_protocol.errors import BudgetExceeded, InvalidRequest, ProtocolViolation
from replay_server_protocol.messages import MailPost
from replay_server_protocol.segment import segment_dir, segment_name

from replay_server.mailbox import Mailboxes

BUDGET = 64 << 10


@pytest.fixture
def run_id() -> str:
    return f"mailtest{time.monotonic_ns()}"


@pytest.fixture
def mailboxes(run_id: str) -> Iterator[Mailboxes]:
    made = Mailboxes(run_id, BUDGET)
    yield made
    made.close()
    assert linked(run_id) == 0


def linked(run_id: str) -> int:
    return sum(path.name.startswith(segment_name(run_id, "")) for path in segment_dir().iterdir())


def post(number: int, name: str = "policy", n_bytes: int = 4096) -> MailPost:
    return MailPost(1, 1, number, name, n_bytes, {"arrays": []})


@pytest.mark.parametrize("seed", range(10))
def test_segments_that_exist_are_the_newest_the_lent_and_the_unfinished(mailboxes: Mailboxes, run_id: str, seed: int) -> None:
    rng = random.Random(seed)
    newest, number = 0, 0
    held: list[tuple[int, int]] = []  # (session, version)
    posting: list[tuple[int, int]] = []
    for _ in range(200):
        session = rng.randint(1, 4)
        action = rng.choice(("post", "finish", "lend", "return", "forget"))
        if action == "post" and len(posting) + len(set(held)) < 10:
            number += 1
            mailboxes.post(session, post(number))
            posting = [p for p in posting if p[0] != session] + [(session, number)]
        elif action == "finish" and posting:
            poster, finished = posting.pop(rng.randrange(len(posting)))
            newest += 1
            assert mailboxes.finish(poster, finished).version == newest
        elif action == "lend":
            since = rng.randint(0, newest)
            lent = mailboxes.lend(session, "policy", since)
            assert (lent.version if lent else None) == (newest if newest > since else None)
            if lent:
                held.append((session, newest))
        elif action == "return" and held:
            reader, version = held.pop(rng.randrange(len(held)))
            mailboxes.give_back(reader, "policy", version)
        elif action == "forget":
            mailboxes.forget(session)
            held = [h for h in held if h[0] != session]
            posting = [p for p in posting if p[0] != session]
        expected = len({version for _, version in held} | ({newest} if newest else set())) + len(posting)
        assert linked(run_id) == expected
        assert mailboxes.host_bytes == 4096 * expected
        assert mailboxes.versions == ({"policy": newest} if newest else {})


def test_an_unfinished_post_is_never_lent(mailboxes: Mailboxes) -> None:
    mailboxes.post(1, post(1))
    assert mailboxes.lend(2, "policy", 0) is None
    mailboxes.finish(1, 1)
    lent = mailboxes.lend(2, "policy", 0)
    assert lent is not None
    assert lent.version == 1


def test_a_version_lent_to_a_slow_reader_stays_while_newer_ones_come(mailboxes: Mailboxes) -> None:
    mailboxes.post(1, post(1))
    mailboxes.finish(1, 1)
    slow = mailboxes.lend(2, "policy", 0)
    assert slow is not None
    mailboxes.post(1, post(2))
    mailboxes.finish(1, 2)
    assert slow.segment.is_linked()
    mailboxes.give_back(2, "policy", 1)
    assert not slow.segment.is_linked()


def test_a_post_beyond_the_budget_is_refused_with_the_numbers_and_leaves_nothing(mailboxes: Mailboxes, run_id: str) -> None:
    with pytest.raises(BudgetExceeded) as refused:
        mailboxes.post(1, post(1, n_bytes=BUDGET + 1))
    assert refused.value.details == {"needed_bytes": BUDGET + 1, "free_bytes": BUDGET}
    assert linked(run_id) == 0
    mailboxes.post(1, post(2, n_bytes=BUDGET))
    with pytest.raises(BudgetExceeded):
        mailboxes.post(2, post(1, n_bytes=1))


def test_a_post_that_is_not_open_can_not_be_finished(mailboxes: Mailboxes) -> None:
    mailboxes.post(1, post(1))
    for session, number in ((2, 1), (1, 2)):
        with pytest.raises(ProtocolViolation):
            mailboxes.finish(session, number)
    mailboxes.finish(1, 1)
    with pytest.raises(ProtocolViolation):
        mailboxes.finish(1, 1)


def test_a_new_post_takes_the_place_of_an_unfinished_one(mailboxes: Mailboxes, run_id: str) -> None:
    for number in range(1, 10):
        mailboxes.post(1, post(number, n_bytes=1))
    assert linked(run_id) == 1
    with pytest.raises(ProtocolViolation):
        mailboxes.finish(1, 8)
    assert mailboxes.finish(1, 9).version == 1


def test_names_are_bounded(mailboxes: Mailboxes) -> None:
    with pytest.raises(InvalidRequest, match="limit"):
        for name in range(100):
            mailboxes.lend(2, f"box{name}", 0)


def test_names_of_unfinished_posts_count_as_mailboxes(mailboxes: Mailboxes) -> None:
    with pytest.raises(InvalidRequest, match="limit"):
        for name in range(100):
            mailboxes.post(100 + name, post(1, f"box{name}", n_bytes=1))
            if name % 2:
                mailboxes.finish(100 + name, 1)
    assert len(mailboxes.versions) <= 64


def test_subscribers_are_those_who_asked_until_they_end(mailboxes: Mailboxes) -> None:
    mailboxes.lend(1, "policy", 0)
    mailboxes.lend(2, "policy", 0)
    mailboxes.lend(2, "other", 0)
    assert mailboxes.subscribers("policy") == {1, 2}
    mailboxes.forget(2)
    assert mailboxes.subscribers("policy") == {1}
    assert mailboxes.subscribers("other") == set()
