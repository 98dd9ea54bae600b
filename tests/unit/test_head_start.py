"""The thread's rest after a batch was lent: half a tick where that leaves time enough, none where it doesn't."""

from __future__ import annotations

from replay_server_client.head_start import HeadStart

MS = 1_000_000


def settled(tick_ns: int, ready_ns: int) -> tuple[HeadStart, int]:
    """A head start after many equal ticks, and the time of its last lending."""
    start, now_ns = HeadStart(), 1
    for _ in range(100):
        start.call(now_ns)
        start.lend(now_ns)
        start.make(ready_ns)
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


def test_one_short_tick_counts_at_once_and_long_ones_come_in_slowly() -> None:
    start, now_ns = settled(8 * MS, 0)
    start.lend(now_ns)
    start.call(now_ns + MS)
    assert rest_ns(start, now_ns + MS) == MS // 2
    start.call(now_ns + 9 * MS)
    assert MS // 2 < rest_ns(start, now_ns + 9 * MS) < MS


def test_one_batch_that_took_long_counts_at_once() -> None:
    start, now_ns = settled(8 * MS, MS // 2)
    start.make(100 * MS)
    assert rest_ns(start, now_ns) == 0
