"""A publish that came by way of another machine is taken once, whoever brings it and however often."""

from __future__ import annotations

import json
import random

import pytest
from replay_server_protocol.codec import server_codec
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import Captured
from replay_server_protocol.origins import MOST_ORIGINS, Origins, Turn
from support.held_ring import Bench, publish

from replay_server.credit import Verdict


def test_numbers_are_taken_in_order_and_once() -> None:
    origins = Origins()
    assert origins.judge("a", 1, 1) is Turn.NEXT
    origins.take("a", 1)
    assert origins.judge("a", 1, 1) is Turn.REPEAT
    assert origins.judge("a", 3, 1) is Turn.EARLY
    assert origins.judge("a", 2, 1) is Turn.NEXT
    assert origins.judge("b", 1, 1) is Turn.NEXT


def test_a_table_that_never_knew_the_origin_goes_on_where_its_answers_ended() -> None:
    assert Origins().judge("a", 41, 41) is Turn.NEXT
    assert Origins().judge("a", 42, 41) is Turn.EARLY


def test_a_number_before_the_first_without_an_answer_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation, match="can't be 5"):
        Origins().judge("a", 4, 5)


def test_the_table_is_bounded_and_forgets_who_was_heard_of_longest_ago() -> None:
    origins = Origins(most=2)
    for origin in ("a", "b", "a", "c"):
        origins.take(origin, origins.last(origin, 1) + 1)
    assert len(origins) == 2
    assert (origins.last("a", 1), origins.last("b", 1), origins.last("c", 1)) == (2, 0, 1)


def test_a_table_made_again_from_its_parts_knows_the_same_and_forgets_in_the_same_order() -> None:
    origins = Origins(most=2)
    for origin in ("a", "b", "b"):
        origins.take(origin, origins.last(origin, 1) + 1)
    origins.take("b", 1)  # one taken again
    again = Origins(most=2)
    again.restore(json.loads(json.dumps(origins.parts)))
    assert (again.last("a", 1), again.last("b", 1)) == (1, 2)
    again.take("c", 1)
    assert (again.last("a", 1), again.last("b", 1)) == (0, 2)


@pytest.mark.parametrize("parts", [{"a": 0}, {"a": "1"}, {"a": True}, {1: 1}])
def test_parts_that_are_no_numbers_of_origins_are_refused(parts: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="is no number of an origin"):
        Origins().restore(parts)


def test_a_full_table_fits_the_message_that_a_snapshot_is_made_from() -> None:
    origins = Origins()
    for number in range(MOST_ORIGINS):
        origins.take(f"{number:032x}", 2**62)
    captured = Captured(1, 1, 1, 0, 1, {"origins": origins.parts}, [])
    assert server_codec.decode(server_codec.encode(captured)) == captured


def test_a_publish_counts_as_committed_only_when_its_rows_are_and_a_repeat_sets_nothing_back() -> None:
    bench = Bench(100, 20)
    session = bench.collector(4, 4)
    for number, taken in enumerate((1, 2, 1), start=1):
        message = publish(number, number - 1, 1)._replace(origin="node", origin_number=taken, origin_first=1)
        bench.ingress.accept(session, message, 0)
    bench.ingress.drain(0)
    found = []
    for _ in range(3):
        found.append(bench.ingress.committed_origins.parts)
        bench.memory.complete(1)
        bench.ingress.commit(0)
    assert [*found, bench.ingress.committed_origins.parts] == [{}, {"node": 1}, {"node": 2}, {"node": 2}]
    restored = Bench(100, 20)
    restored.ingress.restore_origins(bench.ingress.committed_origins.parts)
    again = restored.collector(4, 4)
    for number, taken in enumerate((2, 3), start=1):
        message = publish(number, number - 1, 1)._replace(origin="node", origin_number=taken, origin_first=2)
        restored.ingress.accept(again, message, 0)
    restored.ingress.drain(0)
    restored.memory.complete(2)
    restored.ingress.commit(0)
    assert restored.ring.committed == 1


@pytest.mark.parametrize("seed", range(20))
def test_rows_passed_on_again_by_any_session_in_any_order_are_in_the_ring_once(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(1000, 20)
    sessions = [bench.collector(4, 1) for _ in range(3)]
    for _ in range(200):
        session = rng.choice(sessions)
        taken = bench.ingress._origins.last("node", 1)
        number = rng.randint(max(1, taken - 3), taken + 1)
        if session.credits.outstanding == 0:
            continue
        slot = next(i for i, state in enumerate(session.credits.slots) if state.value == "free")
        bench.fill(session, slot, [number])
        message = publish(session.credits.taken + 1, slot, 1)._replace(origin="node", origin_number=number, origin_first=1)
        assert bench.ingress.accept(session, message, 0) is Verdict.NEW
        bench.ingress.drain(0)
        bench.memory.complete(9)
        bench.ingress.commit(0)
    assert bench.values(0, bench.ring.committed) == list(range(1, bench.ring.committed + 1))
    assert bench.ring.committed == bench.counters.rows_published > 5


def test_one_that_comes_before_its_turn_is_rejected_and_its_slot_comes_back() -> None:
    bench = Bench(100, 20)
    session = bench.collector(4, 1)
    with pytest.raises(ProtocolViolation, match="an earlier publish of its origin is missing"):
        bench.ingress.accept(session, publish(1, 0, 1)._replace(origin="node", origin_number=2, origin_first=1), 0)
    bench.ingress.drain(0)
    bench.memory.complete(1)
    assert bench.ingress.commit(0) == [session]
    assert (bench.ring.committed, session.credits.credited) == (0, 1)
    assert bench.ingress.committed_origins.parts == {}
