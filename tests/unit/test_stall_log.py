"""The log tells a wait once it has lasted, once a period after that, and its end; what is short leaves no line."""

from __future__ import annotations

import pytest

from replay_server.stall_log import Repeats, Stall, StallLog

S = 1_000_000_000
AFTER_S = 10


def stall(key: str = "a", since_s: float = 0.0, why: str = "credits") -> Stall:
    return Stall(key, f"collector {key!r}", round(since_s * S), lambda: why)


@pytest.fixture
def log() -> StallLog:
    return StallLog(AFTER_S * S)


def lines_at(log: StallLog, seconds: range, *waiting: Stall) -> dict[int, list[str]]:
    found = {second: log.tell(waiting, second * S) for second in seconds}
    return {second: lines for second, lines in found.items() if lines}


def test_a_wait_that_ends_sooner_leaves_no_line(log: StallLog) -> None:
    assert lines_at(log, range(AFTER_S), stall()) == {}
    assert lines_at(log, range(AFTER_S, 100)) == {}


def test_a_wait_is_told_once_it_has_lasted_and_then_once_a_period(log: StallLog) -> None:
    found = lines_at(log, range(200), stall())
    assert list(found) == [10, 70, 130, 190]
    assert found[70] == ["collector 'a' has waited for 70.0 s: credits"]


def test_the_end_is_told_with_the_whole_time_and_only_once(log: StallLog) -> None:
    lines_at(log, range(90), stall(since_s=2))
    assert lines_at(log, range(90, 200)) == {90: ["collector 'a' recovered after 88.0 s"]}


def test_progress_between_two_looks_ends_the_wait_and_begins_another(log: StallLog) -> None:
    lines_at(log, range(12), stall())
    assert lines_at(log, range(12, 30), stall(since_s=11.5)) == {
        12: ["collector 'a' recovered after 12.0 s"],
        22: ["collector 'a' has waited for 10.5 s: credits"],
    }


def test_each_wait_has_a_period_of_its_own(log: StallLog) -> None:
    found = lines_at(log, range(80), stall("a"), stall("b", since_s=5))
    assert [(second, line[:13]) for second, lines in found.items() for line in lines] == [
        (10, "collector 'a'"),
        (15, "collector 'b'"),
        (70, "collector 'a'"),
        (75, "collector 'b'"),
    ]


def test_the_reason_is_asked_only_for_a_line() -> None:
    asked = 0

    def why() -> str:
        nonlocal asked
        asked += 1
        return "credits"

    log = StallLog(AFTER_S * S)
    for second in range(69):
        log.tell([Stall("a", "a", 0, why)], second * S)
    assert asked == 1


def test_what_happens_again_is_counted_and_told_once_a_period() -> None:
    repeats = Repeats(60 * S)
    told = {second: times for second in range(0, 180, 10) if (times := repeats.note(7, second * S)) is not None}
    assert told == {0: 1, 60: 6, 120: 6}
    assert repeats.note(8, 130 * S) == 1, "somebody else's first time is told at once"


def test_repeats_forget_whom_nothing_happens_to() -> None:
    repeats = Repeats(60 * S)
    for key in range(1000):
        repeats.note(key, key * S)
    assert len(repeats._told) <= 122
