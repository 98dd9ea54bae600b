"""What the exporter adds up from one report to the next: ages, sums per client, points of the charts, health. No process, no socket."""

from __future__ import annotations

import math
from typing import Any

import pytest

from replay_server.export.client_totals import OTHER, ClientTotals
from replay_server.export.history import KEYS, History
from replay_server.export.record import Look, Record
from replay_server.export.sample_age import AGE_BOUNDS_S, SampleAge
from replay_server.export.timeline import Timeline, age_s, shares_below


def report(generation: int = 1, committed: int = 0, tail: int = 0, **parts: Any) -> dict[str, Any]:
    ring = {"committed": committed, "tail": tail, "size_rows": committed - tail, "capacity_rows": 100}
    return {"report_version": 1, "generation": generation, "phase": "serving", "uptime_s": 10.0, "ring": ring, **parts}


def client(name: str, pid: int = 1, **sums: float) -> dict[str, Any]:
    return {"name": name, "pid": pid, **sums}


def test_rows_committed_evenly_have_even_ages() -> None:
    timeline = Timeline()
    for second in range(101):
        timeline.note(float(second), 10 * second, 0)
    assert timeline.time_of(505) == pytest.approx(50.5)
    assert timeline.committed_at(50.5) == pytest.approx(505)
    assert age_s(timeline, 100.0, 1000, 0, 0.5) == pytest.approx(50)
    assert age_s(timeline, 100.0, 1000, 800, 0.5) == pytest.approx(10)
    assert shares_below(timeline, 100.0, 1000, 0, [10, 50, 100, 1000]) == pytest.approx([0.1, 0.5, 1, 1])


def test_a_pause_ages_every_row_and_is_kept_as_two_points() -> None:
    timeline = Timeline()
    timeline.note(0.0, 0, 0)
    timeline.note(10.0, 100, 0)
    for second in range(11, 1000):
        timeline.note(float(second), 100, 0)
    assert timeline.points == 3
    timeline.note(1000.0, 200, 0)
    assert shares_below(timeline, 1000.0, 200, 0, [1, 500, 989, 1000]) == pytest.approx([0.5, 0.5, 0.5, 1], abs=1e-2)
    assert age_s(timeline, 1000.0, 200, 0, 0.75) == pytest.approx(995)


def test_a_timeline_is_bounded_and_forgets_what_the_ring_has_overwritten() -> None:
    timeline = Timeline()
    for second in range(20_000):
        timeline.note(float(second), second, 0)
    assert timeline.points <= 2049
    assert timeline.time_of(15_000) == pytest.approx(15_000)
    timeline.note(20_000.0, 20_000, 19_990)
    assert timeline.points < 20
    timeline.note(19_000.0, 30_000, 0)  # a clock that goes back changes nothing
    assert timeline.points < 20


def test_sampled_rows_count_once_by_the_ages_in_the_window() -> None:
    age = SampleAge()
    assert age.see(100.0, report(committed=0), 0) == (None, None)
    for second in range(1, 101):
        half, high = age.see(100.0 + second, report(committed=10 * second), 7)
    assert age.rows == 700
    assert half == pytest.approx(50, abs=1)
    assert high == pytest.approx(95, abs=1)
    assert age.below_rows == sorted(age.below_rows)
    assert age.below_rows[AGE_BOUNDS_S.index(120.0)] == pytest.approx(700)
    assert age.sum_s == pytest.approx(sum(7 * second / 2 for second in range(1, 101)), rel=0.01)


def test_rows_from_before_the_first_look_count_as_committed_evenly_since_the_start() -> None:
    age = SampleAge()
    assert age.see(1000.0, report(committed=500), 0) == pytest.approx((5.0, 9.5))


def test_a_new_generation_has_a_timeline_of_its_own() -> None:
    age = SampleAge()
    age.see(1000.0, report(committed=500), 0)
    assert age.see(1001.0, report(generation=2, committed=10, uptime_s=0.5), 0) == pytest.approx((0.25, 0.475))


def test_sums_of_a_name_rise_over_reconnects_and_restarts() -> None:
    totals = ClientTotals(["rows"], 4)
    assert totals.see(1, [client("a", rows=5)]) == {"rows": 5}
    assert totals.see(1, [client("a", rows=8)]) == {"rows": 3}
    assert totals.see(1, [client("a", rows=2)]) == {"rows": 2}  # attached anew
    assert totals.see(1, []) == {"rows": 0}
    assert totals.see(1, [client("a", pid=2, rows=1)]) == {"rows": 1}
    assert totals.see(2, [client("a", pid=2, rows=4)]) == {"rows": 4}  # another server
    assert totals.totals == {OTHER: {"rows": 0}, "a": {"rows": 15}}


def test_names_beyond_the_limit_share_one_label_for_good() -> None:
    totals = ClientTotals(["rows"], 2)
    totals.see(1, [client(f"c{n}", rows=1) for n in range(100)])
    totals.see(1, [client("c99", rows=5)])
    assert {label: sums["rows"] for label, sums in totals.totals.items()} == {"c0": 1, "c1": 1, OTHER: 102}


def test_a_client_that_calls_itself_other_counts_there() -> None:
    totals = ClientTotals(["rows"], 2)
    totals.see(1, [client(OTHER, rows=3)])
    assert totals.totals == {OTHER: {"rows": 3}}


def test_points_hold_fifteen_minutes_and_are_handed_out_once() -> None:
    history = History(interval_s=1.0)
    for second in range(1000):
        history.absent(float(second))
    number, points = history.after(0)
    assert (number, len(points), points[0][0]) == (1000, 900, 100.0)
    assert history.after(number) == (1000, [])
    assert history.after(998)[1] == [(998.0, *(None,) * (len(KEYS) - 1)), (999.0, *(None,) * (len(KEYS) - 1))]
    assert len(history.after(5000)[1]) == 900  # numbers of an exporter before this one


def test_waits_are_shares_of_the_time_between_two_looks() -> None:
    history = History(interval_s=1.0)
    states = {"free": 1.0, "collectors_wait_for_lease": 2.0, "learners_wait_for_seq": 0.0, "both_wait": 0.0}
    later = {"free": 1.0, "collectors_wait_for_lease": 2.5, "learners_wait_for_seq": 0.25, "both_wait": 0.25}
    for time_s, generation, seconds in ((1.0, 1, states), (2.0, 1, later), (3.0, 2, later)):
        history.see(time_s, report(generation, flow={"time_in_state_s": seconds}), (None, None))
    columns = dict(zip(KEYS, zip(*history.after(0)[1], strict=True), strict=True))
    assert columns["collectors_wait"] == (None, pytest.approx(0.75), None)
    assert columns["learners_wait"] == (None, pytest.approx(0.5), None)


def test_health_says_what_is_wrong() -> None:
    record = Record(interval_s=1.0, most_names=4)
    assert record.why_unhealthy(0.0) == "no question was asked yet"
    record.see(Look(100.0, 1.0, report()))
    assert record.why_unhealthy(2.0) is None
    assert record.why_unhealthy(11.0) == "the last report is 10 s old"
    record.see(Look(101.0, 2.0, {**report(), "phase": "waiting_for_memory"}))
    assert record.why_unhealthy(2.0) == "phase waiting_for_memory"
    record.see(Look(102.0, 3.0, None, "no server answered"))
    assert record.why_unhealthy(3.0) == "no server answered"


def test_a_report_of_another_version_counts_as_none_and_says_so() -> None:
    record = Record(interval_s=1.0, most_names=4)
    record.see(Look(100.0, 1.0, {**report(), "report_version": 2}))
    assert record.look.report is None
    assert "version 2" in (record.look.error or "")
    assert record.looks == {"answered": 0, "absent": 1}


def test_a_report_that_lacks_everything_is_taken_as_zeros() -> None:
    record = Record(interval_s=1.0, most_names=4)
    record.see(Look(100.0, 1.0, {"report_version": 1}))
    assert record.why_unhealthy(1.0) == "phase None"
    assert record.view(0).points[0][1] == 0.0


def test_a_restart_is_counted_and_points_go_on() -> None:
    record = Record(interval_s=1.0, most_names=4)
    for at_s, found in enumerate((report(1, 50), None, report(2, 10), report(2, 20))):
        record.see(Look(100.0 + at_s, float(at_s), found))
    assert record.restarts == 1
    assert [point[1] for point in record.view(0).points] == [0.5, None, 0.1, 0.2]
    assert math.isclose(record.sample_age.rows, 0.0)
