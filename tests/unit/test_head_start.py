"""The thread's rest after a batch was lent: half a tick where that leaves time enough, none where it doesn't."""

from __future__ import annotations

import contextlib
import time

import pytest
from replay_server_client.conversation import AT_REST_S, IDLE_NAP_S
from replay_server_client.engine import Engine
from replay_server_client.head_start import HeadStart
from support.clock import FakeClock
from support.granting import GrantingConnection

MS = 1_000_000


def settled(tick_ns: int, ready_ns: int) -> tuple[HeadStart, int]:
    """A head start after many equal ticks, and the time of its last lending."""
    start, now_ns = HeadStart(), 1
    for _ in range(100):
        start.call(now_ns)
        start.lend(now_ns)
        start.got_ready(ready_ns)
        now_ns += tick_ns
    start.call(now_ns)
    return start, now_ns


def rest_ns(start: HeadStart, now_ns: int) -> int:
    return start.lend(now_ns) - now_ns


def test_the_first_batch_is_followed_by_no_rest() -> None:
    assert rest_ns(HeadStart(), 5 * MS) == 0


def test_half_of_a_long_tick_is_left_to_the_caller() -> None:
    start, now_ns = settled(6 * MS, MS // 2)
    assert abs(rest_ns(start, now_ns) - 3 * MS) <= 100


def test_no_more_than_five_milliseconds() -> None:
    start, now_ns = settled(1000 * MS, MS)
    assert rest_ns(start, now_ns) == 5 * MS


def test_three_times_what_a_batch_takes_stay_of_the_tick() -> None:
    start, now_ns = settled(6 * MS, 3 * MS // 2)
    assert abs(rest_ns(start, now_ns) - 3 * MS // 2) <= 100
    start, now_ns = settled(6 * MS, 2 * MS)
    assert rest_ns(start, now_ns) == 0


def test_a_loop_that_only_samples_has_no_rest() -> None:
    start, now_ns = settled(MS // 10, MS // 4)
    assert rest_ns(start, now_ns) == 0


def test_the_shortest_of_the_last_eight_ticks_counts() -> None:
    start, now_ns = settled(8 * MS, 0)
    for tick_ns, rest_of_then_ns in [(MS, 4 * MS), *[(8 * MS, MS // 2)] * 8]:
        assert rest_ns(start, now_ns) == rest_of_then_ns
        now_ns += tick_ns
        start.call(now_ns)
    assert rest_ns(start, now_ns) == 4 * MS


def test_a_long_tick_among_short_ones_makes_no_longer_rest() -> None:
    start, now_ns = HeadStart(), 1
    rests_ns = []
    for _ in range(20):
        for tick_ns in (MS, 50 * MS):
            rests_ns.append(rest_ns(start, now_ns))
            now_ns += tick_ns
            start.call(now_ns)
    assert max(rests_ns) == MS // 2


def test_calls_that_had_no_batch_count_for_nothing() -> None:
    start, now_ns = settled(2 * MS, 0)
    for _ in range(8):
        start.call(now_ns := now_ns + 1000 * MS)
    assert rest_ns(start, now_ns) == MS


def test_one_batch_that_took_long_counts_for_eight() -> None:
    start, now_ns = settled(8 * MS, MS // 2)
    start.got_ready(100 * MS)
    for _ in range(7):
        assert rest_ns(start, now_ns) == 0
        start.got_ready(MS // 2)
    start.got_ready(MS // 2)
    assert rest_ns(start, now_ns) > 0


def test_a_call_that_had_to_wait_is_followed_by_eight_without_a_rest() -> None:
    start, now_ns = settled(8 * MS, 0)
    assert rest_ns(start, now_ns) == 4 * MS
    start.was_late()
    for _ in range(8):
        assert rest_ns(start, now_ns) == 0
        start.call(now_ns := now_ns + 8 * MS)
    assert rest_ns(start, now_ns) == 4 * MS


def test_the_next_batch_is_asked_for_a_tick_and_a_rest_later_at_the_soonest() -> None:
    start, now_ns = settled(6 * MS, MS // 2)
    begin_ns = start.lend(now_ns)
    assert start.next_ns == begin_ns + 6 * MS
    start.call(now_ns + 6 * MS)
    assert start.lend(now_ns + 6 * MS) == start.next_ns - 6 * MS


def test_without_a_rest_nobody_knows_when_the_next_batch_is_asked_for() -> None:
    start, now_ns = settled(6 * MS, 2 * MS)
    start.lend(now_ns)
    assert start.next_ns == 0


class Dozing:
    """An engine whose thread does not run, at the time ``now_ns``, with the sleeps it asks for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now_ns: int) -> None:
        connection = GrantingConnection(FakeClock())
        self.engine = Engine(connection, "cpu", None)
        self.slept_ms: list[float] = []
        self.unheard_ms: list[float] = []

        def sleep(timeout_s: float, also: tuple[int, ...] = ()) -> None:
            assert tuple(also) == (self.engine._wake.fd,)
            self.slept_ms.append(timeout_s * 1e3)

        monkeypatch.setattr(connection, "sleep", sleep)
        monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
        monkeypatch.setattr(time, "sleep", lambda rest_s: self.unheard_ms.append(round(rest_s * 1e3, 6)))


@pytest.mark.parametrize(
    ("left_ms", "slept_ms", "unheard_ms"), [(5.0, [5.0], []), (2.99, [2.0], []), (1.01, [1.0], []), (0.5, [], [0.5]), (0.0, [], [])]
)
def test_a_rest_is_never_longer_and_ends_with_the_bell(
    monkeypatch: pytest.MonkeyPatch, left_ms: float, slept_ms: list[float], unheard_ms: list[float]
) -> None:
    dozing = Dozing(monkeypatch, 1000 * MS)
    with contextlib.closing(dozing.engine) as engine:
        engine._rest_until(1000 * MS + round(left_ms * MS))
        assert (dozing.slept_ms, dozing.unheard_ms) == (slept_ms, unheard_ms)


@pytest.mark.parametrize(("nap_s", "slept_ms"), [(AT_REST_S, [7.0, 2.0]), (IDLE_NAP_S, [500.0, 2.0])])
def test_who_waits_for_the_caller_alone_wakes_when_it_may_have_come(
    monkeypatch: pytest.MonkeyPatch, nap_s: float, slept_ms: list[float]
) -> None:
    dozing = Dozing(monkeypatch, 1000 * MS)
    with contextlib.closing(dozing.engine) as engine:
        engine._wake.ring(1002 * MS, 1007 * MS)
        engine._doze(nap_s)
        assert dozing.slept_ms == slept_ms


def test_after_that_it_sleeps_until_the_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    dozing = Dozing(monkeypatch, 1008 * MS)
    with contextlib.closing(dozing.engine) as engine:
        engine._wake.ring(1002 * MS, 1007 * MS)
        engine._doze(AT_REST_S)
        assert dozing.slept_ms == [AT_REST_S]
