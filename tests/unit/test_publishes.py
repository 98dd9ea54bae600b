"""The publishes of a session, as numbers alone: what a credit answers, when all is said again, how the next session goes on."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from replay_server_client.publishes import Publishes
from replay_server_client.remains import KeptPublish, Remains
from replay_server_client.slot_writer import Filled
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import Credit, Publish, SegmentLent
from replay_server_protocol.origins import Origins, Turn

NO_ROWS = np.empty(0, np.uint8)


def session(number: int = 1, remains: Remains | None = None) -> Publishes:
    """Of generation 10 times its number, from second 0 on."""
    lent = SegmentLent(number, 10 * number, "segment", 4, 8, 64, {}, [], "reject", True, resumes=remains is not None)
    return Publishes.of(lent, remains, 0.0)


def filled(rows: int, rejected: int = 0, offender: tuple[str, int] | None = None, versions: bytes = b"") -> Filled:
    return Filled(rows, rejected, rejected, b"", [], b"", versions, offender)


def published(before: Publishes, *rows: int, now_s: float = 0.0) -> Publishes:
    for slot, n in enumerate(rows):
        before = before.with_publish(slot, filled(n), 0, "", now_s)
    return before


def credit(of: Publishes, number: int, committed: int = 0) -> Credit:
    return Credit(of.session, of.generation, number, committed)


def lost(found: Publishes) -> Remains:
    """What the session leaves when its server is lost."""
    again = (KeptPublish(publish, NO_ROWS) for publish in found.unanswered)
    return Remains(found.origin, found.credited, (*again, *found.kept), found.committed, placed=found.placed)


def test_publishes_are_numbered_from_one_and_count_as_rows_until_their_credit() -> None:
    found = published(session(), 5, 0, 7)
    assert [(publish.number, publish.slot, publish.rows) for publish in found.unanswered] == [(1, 0, 5), (2, 1, 0), (3, 2, 7)]
    assert {publish[:2] for publish in found.unanswered} == {(1, 10)}
    assert (found.unanswered_rows, found.newest.number, found.credited) == (12, 3, 0)


def test_a_credit_answers_every_publish_up_to_its_number_and_an_old_one_again_answers_none() -> None:
    before = published(session(), 5, 6, 7)
    found = before.with_credit(credit(before, 2, committed=11), 1.0)
    assert [publish.number for publish in found.answered_since(before)] == [1, 2]
    assert [publish.number for publish in found.unanswered] == [3]
    assert (found.committed, found.credited, found.unanswered_rows) == (11, 2, 7)
    again = found.with_credit(credit(found, 1, committed=5), 2.0)
    assert again.answered_since(found) == ()
    assert again == found._replace(quiet_since_s=2.0)
    everything = again.with_credit(credit(again, 3, committed=18), 3.0)
    assert (everything.unanswered, everything.credited, everything.committed, everything.unanswered_rows) == ((), 3, 18, 0)


def test_a_credit_for_what_was_not_published_raises() -> None:
    with pytest.raises(ProtocolViolation, match="credit for publish 3, but only 2 were published"):
        (found := published(session(), 5, 6)).with_credit(credit(found, 3), 1.0)


def test_all_is_repeated_after_a_second_in_which_the_first_had_no_credit() -> None:
    assert not session().is_to_repeat(100.0), "nothing is unanswered"
    found = published(session(), 5, now_s=100.0)
    found = published(found, 6, now_s=100.9)
    assert not found.is_to_repeat(100.99)
    assert found.is_to_repeat(101.0)
    assert not found.with_repeat(101.0).is_to_repeat(101.9)
    assert found.with_repeat(101.0).is_to_repeat(102.0)
    assert found.with_repeat(101.0).quiet_since_s == 100.0, "a repeat is no credit"
    assert not found.with_credit(credit(found, 1), 101.5).is_to_repeat(102.4)
    assert found.with_credit(credit(found, 1), 101.5).is_to_repeat(102.5)
    assert not found.with_credit(credit(found, 2), 101.5).is_to_repeat(200.0)


def test_an_offender_is_told_by_its_place_among_all_rows_that_were_placed() -> None:
    found = published(session(), 5, 6).with_publish(0, filled(3, rejected=2, offender=("reward", 4)), 0, "", 0.0)
    assert (found.newest.nonfinite_field, found.newest.nonfinite_row) == ("reward", 15)
    found = found.with_publish(1, filled(4), 0, "", 0.0)
    assert (found.newest.nonfinite_field, found.newest.nonfinite_row) == ("", 0)
    assert found.placed == 20, "rejected rows have places"


def test_a_mailbox_is_named_only_with_versions_and_masked_rows_as_they_are_told() -> None:
    without = session().with_publish(0, filled(3), 2, "policy", 0.0).newest
    assert (without.mailbox, without.masked) == ("", 2)
    assert session().with_publish(0, filled(3, versions=b"v"), 0, "policy", 0.0).newest.mailbox == "policy"


def test_no_origin_is_told_where_no_session_can_go_on() -> None:
    assert [publish[-3:] for publish in published(session(), 5, 6).unanswered] == [("", 0, 0)] * 2


def test_the_next_session_goes_on_in_the_numbers_of_the_origin_with_what_had_no_credit_first() -> None:
    first = published(session(1, replace(Remains.of_nothing(), origin="me")), 5, 6, 7)
    first = first.with_credit(credit(first, 1, committed=5), 0.0)
    second = session(2, lost(first))
    assert (second.unanswered, second.credited, second.committed, second.placed, second.kept_rows) == ((), 1, 5, 18, 13)
    again = second.with_kept(3, 7.0)
    assert again.newest == first.unanswered[0]._replace(session=2, generation=20, number=1, slot=3, origin_number=2, origin_first=2)
    assert [kept.publish.origin_number for kept in again.kept] == [3]
    assert (again.unanswered_rows, again.kept_rows) == (6, 7), "kept or unanswered, none is committed"
    new = published(again.with_kept(0, 7.0), 8)
    assert [publish[-3:] for publish in new.unanswered] == [("me", 2, 2), ("me", 3, 2), ("me", 4, 2)]
    assert not new.is_to_repeat(7.9)
    assert new.is_to_repeat(8.0)
    assert [publish.origin_number for publish in new.with_credit(credit(new, 2), 0.0).unanswered] == [4]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_or_said_again_each_publish_is_taken_once_and_in_order(seed: int) -> None:
    """The ring's server takes by origin and number; servers that pass on are lost with what was said to them and what they answered."""
    rng, origins, taken, made = random.Random(seed), Origins(), list[int](), 0
    found = session(1, Remains.of_nothing())

    def say(publish: Publish) -> None:
        turn = origins.judge(publish.origin, publish.origin_number, publish.origin_first)
        if turn is Turn.NEXT and rng.random() < 0.8:
            origins.take(publish.origin, publish.origin_number)
            taken.append(publish.rows)

    for turn in range(300):
        what = rng.random()
        through = origins.last(found.origin, found.credited + 1) - found.before
        if what < 0.1:
            found = session(turn + 2, lost(found))
        elif what < 0.3 and 0 <= through <= found.number:
            found = found.with_credit(credit(found, rng.randint(0, through)), 0.0)
        elif what < 0.5:
            for publish in found.unanswered:
                say(publish)
        else:
            made += not found.kept
            found = found.with_kept(0, 0.0) if found.kept else published(found, made)
            say(found.newest)
    while found.kept:
        found = found.with_kept(0, 0.0)
    while len(taken) < made:
        for publish in found.unanswered:
            say(publish)
    assert taken == list(range(1, made + 1))
