"""Time in each state: nothing is lost or counted twice, and the last minute forgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_server.flow_clock import FlowClock

STATES = ("free", "held", "starved")
SECOND_NS = 1_000_000_000


@given(start_ns=st.integers(0, 2**40), turns=st.lists(st.tuples(st.sampled_from(STATES), st.integers(0, 90 * SECOND_NS)), max_size=60))
def test_sums_are_those_of_a_list_of_all_turns(start_ns: int, turns: list[tuple[str, int]]) -> None:
    clock = FlowClock(STATES, "free", start_ns)
    now_ns, state, since_ns, spans = start_ns, "free", start_ns, []
    for told, after_ns in turns:
        spans.append((state, now_ns, now_ns + after_ns))
        now_ns += after_ns
        clock.tell(told, now_ns)
        if told != state:
            state, since_ns = told, now_ns
    found = clock.statistics(now_ns)
    for name in STATES:
        assert found.total_s[name] == pytest.approx(sum(end - begin for s, begin, end in spans if s == name) / SECOND_NS)
    assert found.since_s == (now_ns - since_ns) / SECOND_NS
    recent_s = sum(found.recent_s.values())
    assert recent_s >= min(60.0, (now_ns - start_ns) / SECOND_NS) - 1e-6
    begin_ns = now_ns - recent_s * SECOND_NS
    for name in STATES:
        inside = sum(max(0.0, end - max(begin, begin_ns)) for s, begin, end in spans if s == name)
        assert found.recent_s[name] == pytest.approx(inside / SECOND_NS, abs=1e-5)


def test_the_last_minute_is_at_most_a_second_too_long_when_turns_are_short() -> None:
    clock = FlowClock(STATES, "free", 0)
    for tenth in range(10 * 200):
        clock.tell("held" if tenth < 1000 else "free", tenth * SECOND_NS // 10)
    found = clock.statistics(200 * SECOND_NS)
    assert 60 <= sum(found.recent_s.values()) <= 61
    assert found.recent_s["held"] == 0
    assert found.total_s == {"free": pytest.approx(100), "held": pytest.approx(100), "starved": 0}


def test_a_state_that_lasts_is_counted_without_being_told_again() -> None:
    clock = FlowClock(STATES, "free", 5 * SECOND_NS)
    clock.tell("held", 6 * SECOND_NS)
    found = clock.statistics(10 * SECOND_NS)
    assert (found.since_s, found.total_s["free"], found.total_s["held"]) == (4.0, 1.0, 4.0)


def test_asking_changes_no_sum() -> None:
    asked, left = FlowClock(STATES, "free", 0), FlowClock(STATES, "free", 0)
    for turn in range(1, 500):
        state = STATES[turn // 7 % 3]
        for clock in (asked, left):
            clock.tell(state, turn * SECOND_NS // 3)
        asked.statistics(turn * SECOND_NS // 3 + 5)
    assert asked.statistics(200 * SECOND_NS) == left.statistics(200 * SECOND_NS)


def test_memory_does_not_grow_with_the_time_served() -> None:
    clock = FlowClock(STATES, "free", 0)
    for second in range(1000):
        clock.tell(STATES[second % 3], second * SECOND_NS)
    assert len(clock._noted) <= 62
