"""The thread's rest after a batch was lent: half a tick where that leaves time enough, none where it doesn't."""

from __future__ import annotations

import contextlib
import time

import pytest
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


@pytest.mark.parametrize(("left_ms", "slept_s"), [(5.0, 0.005), (2.99, 0.002), (1.01, 0.001), (0.0, None)])
def test_the_rest_is_never_longer_and_ends_with_the_bell(monkeypatch: pytest.MonkeyPatch, left_ms: float, slept_s: float | None) -> None:
    connection = GrantingConnection(FakeClock())
    slept: list[tuple[float, tuple[int, ...]]] = []
    monkeypatch.setattr(connection, "sleep", lambda rest_s, also=(): slept.append((rest_s, tuple(also))))
    monkeypatch.setattr(time, "monotonic_ns", lambda: 1000 * MS)
    with contextlib.closing(Engine(connection, "cpu", None)) as engine:
        engine._wake.ring(1000 * MS + round(left_ms * MS))
        engine._leave_head_start()
        assert slept == ([] if slept_s is None else [(slept_s, (engine._wake.fd,))])
