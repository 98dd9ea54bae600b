"""What ``top`` draws from reports that a real server gave, at every size, and what it makes of the differences between them."""

from __future__ import annotations

import io
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from replay_server.top.events import differences
from replay_server.top.picture import Picture
from replay_server.top.plain import line
from replay_server.top.watch import MOST_EVENTS, MOST_RATES, View, Watch

RECORDED = (Path(__file__).parents[1] / "support" / "recorded_report.json").read_text("utf-8")
SCHEMA = json.loads(files("replay_server").joinpath("status_report.schema.json").read_text("utf-8"))
REASON = "samples per insert 1: learners must sample 504 more rows (sampled 548,864, inserted 568,856, tolerance 20,000)"
WIDTHS = (60, 61, 79, 80, 89, 90, 100, 132, 200)


def recorded(**changed: Any) -> dict[str, Any]:
    """The recorded report with these keys changed: ``flow=dict(...)`` changes keys inside."""
    report: dict[str, Any] = json.loads(RECORDED)
    for key, value in changed.items():
        report[key] = {**report[key], **value} if isinstance(value, dict) and isinstance(report[key], dict) else value
    return report


def blocked(since_s: float) -> dict[str, Any]:
    flow = {"state": "collectors_wait_for_samples", "blocked_side": "collectors", "reason": REASON, "since_s": since_s}
    report = recorded(flow=flow)
    for collector in report["collectors"]:
        collector.update(waiting_on=REASON, waiting_s=since_s)
    return report


def crowd(count: int, waiting: int) -> dict[str, Any]:
    """``count`` collectors, the last ``waiting`` of which wait."""
    report = recorded()
    one = {**report["collectors"][0], "waiting_on": None, "waiting_s": 0.0}
    report["collectors"] = [{**one, "name": f"walker-{n}", "pid": 1000 + n} for n in range(count)]
    for n in range(count - waiting, count):
        report["collectors"][n].update(waiting_on=REASON, waiting_s=float(n))
    return report


def view_of(report: dict[str, Any]) -> View:
    return Watch("default").take(report, 0.0, "12:00:00")


def drawn(view: View, width: int, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height or 25, force_terminal=True, color_system=None, _environ={})
    picture = Picture(view, fits_screen=height is not None)
    lines = ["".join(segment.text for segment in row).rstrip() for row in console.render_lines(picture, pad=False)]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def run_together(text: str) -> str:
    return "".join(text.split())


def test_every_key_of_the_recorded_report_is_one_of_todays() -> None:
    def look(part: Any, described: dict[str, Any], path: str) -> None:
        if isinstance(part, dict) and "properties" in described:
            for key, value in part.items():
                assert key in described["properties"], f"{path}.{key} has gone: python scripts/draw_top.py --record"
                look(value, described["properties"][key], f"{path}.{key}")
        if isinstance(part, list):
            for value in part:
                look(value, described.get("items", {}), f"{path}[]")

    look(recorded(), SCHEMA, "report")


@pytest.mark.parametrize("width", WIDTHS)
def test_at_every_width_all_figures_are_there_and_nothing_is_cut_off(width: int) -> None:
    report = blocked(2.5)
    lines = drawn(view_of(report), width)
    assert max(map(len, lines)) <= width
    text, joined = "\n".join(lines), run_together("".join(row[11:] for row in lines))
    assert "…" not in text
    ring = report["ring"]
    for figure in ("default", "serving", f"pid {report['pid']}", f"generation {report['generation']}"):
        assert run_together(figure) in run_together(text)
    assert f"{ring['size_rows']:,} of {ring['capacity_rows']:,} rows, window [{ring['tail']:,}, {ring['committed']:,})" in text
    assert f"{report['rates']['rows_per_s']:,.0f} rows/s" in text
    assert run_together(f"collectors blocked for 2.5 s (collectors_wait_for_samples): {REASON}") in joined
    for client in (*report["collectors"], *report["learners"]):
        assert client["name"] in text
        assert f"{client.get('committed_rows', client.get('batches')):,}" in text
    assert text.count("2.5 s") >= 3  # the side and both collectors
    for part in ("commit", "grant", "slots", "mailboxes", "samples per insert", "last minute", "episodes"):
        assert part in text


@pytest.mark.parametrize("width", WIDTHS)
def test_the_longest_names_and_figures_fold_and_lose_no_digit(width: int) -> None:
    report = recorded()
    report["collectors"] = [
        {**report["collectors"][0], "name": "Z" * 64, "pid": 4_194_304, "committed_rows": 9_999_999, "waiting_on": None}
    ]
    report["learners"][0].update(batches=9_999_999, dropped=9_999_998, waiting_on=REASON, waiting_s=999.9)
    watch = Watch("default")
    before = json.loads(json.dumps(report))
    before["collectors"][0]["committed_rows"] = before["learners"][0]["batches"] = 0
    watch.take(before, 0.0, "12:00:00")
    text = "\n".join(drawn(watch.take(report, 1.0, "12:00:01"), width))
    assert "…" not in text
    assert text.count("Z") == 64
    assert text.count("9,999,999") == 4
    assert "9,999,998" in text
    assert "999.9 s" in text
    assert "4194304" in text


@pytest.mark.parametrize("height", [10, 16, 24, 30, 50])
@pytest.mark.parametrize("width", [60, 100])
def test_a_low_terminal_is_never_overrun_and_what_is_left_out_is_told(width: int, height: int) -> None:
    watch = Watch("default")
    watch.take(recorded(collectors=[]), 0.0, "12:00:00")
    lines = drawn(watch.take(crowd(70, 5), 1.0, "12:00:01"), width, height)
    assert len(lines) <= height
    text = "\n".join(lines)
    assert lines[-1] == "q leaves"
    assert "more, " in text or "enlarge the terminal" in text
    if "more, " in text and "enlarge" not in text:
        assert "walker-69" in text  # the one that waits longest comes first
        listed = len(re.findall(r"walker-\d+ +\d{4} ", text))
        assert f"and {70 - listed} more, {max(0, 5 - listed)} of them waiting" in text


def test_a_high_terminal_shows_everybody_and_as_many_events_as_there_is_room_for() -> None:
    watch = Watch("default")
    watch.take(recorded(collectors=[]), 0.0, "12:00:00")
    lines = drawn(watch.take(crowd(20, 0), 1.0, "12:00:01"), 100, 60)
    assert all(any(f"walker-{n} " in row for row in lines) for n in range(20))
    assert len(lines) <= 60
    assert "came" in lines[-2]


def test_markup_in_a_reason_is_shown_and_not_obeyed() -> None:
    report = blocked(2.0)
    report["flow"]["reason"] = "[red]a lease[/red] [/]"
    assert "[red]a lease[/red] [/]" in "\n".join(drawn(view_of(report), 100))


@pytest.mark.parametrize("phase", ["waiting_for_schema", "waiting_for_memory", "closing"])
def test_a_server_without_a_ring_is_drawn(phase: str) -> None:
    flow = {"state": phase, "blocked_side": None, "reason": None, "samples_per_insert": None, "samples_per_insert_target": None}
    nothing = {"p50": None, "p99": None}
    report = recorded(phase=phase, ring=None, schema=None, flow=flow, latency={"commit_us": nothing, "grant_us": nothing})
    report.update(collectors=[], learners=[], episodes=None, staleness=None)
    assert phase in "\n".join(drawn(view_of(report), 80))
    assert phase in line(view_of(report), "12:00:00")


def test_a_server_that_goes_is_waited_for_and_its_return_is_an_event() -> None:
    watch = Watch("main")
    view = watch.miss("no server named main in /run", 0.0, "12:00:00")
    assert "no server named main in /run, waiting for 0 s" in drawn(view, 80)[0]
    assert not view.events
    watch.take(recorded(), 1.0, "12:00:01")
    watch.miss("no server named main in /run", 2.0, "12:00:02")
    view = watch.miss("no server named main in /run", 5.0, "12:00:05")
    text = "\n".join(drawn(view, 100))
    assert "waiting for 3 s" in text
    assert "last seen" in text
    view = watch.take(recorded(pid=7, generation=8), 6.0, "12:00:06")
    assert [event.words for event in view.events] == [
        "no server named main in /run",
        "another server: pid 7, generation 8; its ring is a new one",
    ]
    assert view.missing is None
    assert not view.client_rates  # counts of two servers have no difference
    watch.miss("no server named main in /run", 7.0, "12:00:07")
    assert watch.take(recorded(pid=7, generation=8), 9.0, "12:00:09").events[-1].words == "the server answers again after 2 s"


def test_a_report_of_another_version_is_told_and_not_misread() -> None:
    view = Watch("main").take({"report_version": 2}, 0.0, "12:00:00")
    assert "version 2" in drawn(view, 80)[0]
    assert "version 2" in line(view, "12:00:00")


def test_nothing_happened_between_equal_reports() -> None:
    assert differences(recorded(), recorded()) == []


def test_clients_that_come_go_and_are_away_are_events() -> None:
    before, after = recorded(), recorded()
    after["collectors"] = [{**after["collectors"][0], "state": "away"}, {**after["collectors"][1], "name": "new", "pid": 1}]
    first, second = before["collectors"]
    assert sorted(differences(before, after)) == sorted(
        [
            f"collector {first['name']} (pid {first['pid']}) is away",
            f"collector {second['name']} (pid {second['pid']}) left",
            "collector new (pid 1) came",
        ]
    )


def test_every_rise_of_a_counter_of_trouble_is_an_event() -> None:
    counters = recorded()["counters"]
    after = recorded(counters={"rows_rejected": counters["rows_rejected"] + 1200, "leases_revoked": counters["leases_revoked"] + 1})
    assert differences(recorded(), after) == ["1,200 rows rejected", "1 leases revoked: a learner held one longer than --lease"]


def test_a_wait_is_an_event_once_it_lasts_a_second_and_again_when_it_ends() -> None:
    free, short, long, longer = recorded(), blocked(0.5), blocked(1.5), blocked(2.5)
    assert differences(free, short) == []
    assert differences(short, long) == [f"collectors_wait_for_samples: {REASON}"]
    assert differences(free, long) == [f"collectors_wait_for_samples: {REASON}"]
    assert differences(long, longer) == []
    assert differences(longer, free) == ["collectors_wait_for_samples ended after 2.5 s or more"]
    assert differences(longer, short) == ["collectors_wait_for_samples ended after 2.5 s or more"]


def test_rates_of_clients_are_differences_over_the_time_between() -> None:
    watch, after = Watch("main"), recorded()
    after["collectors"][0]["committed_rows"] += 500
    after["learners"][0]["batches"] += 10
    watch.take(recorded(), 10.0, "12:00:00")
    rates = watch.take(after, 12.0, "12:00:02").client_rates
    (first, second), learner = after["collectors"], after["learners"][0]
    assert rates["collectors", first["name"], first["pid"]] == 250.0
    assert rates["collectors", second["name"], second["pid"]] == 0.0
    assert rates["learners", learner["name"], learner["pid"]] == 5.0


def test_what_is_remembered_is_bounded() -> None:
    watch = Watch("main")
    for turn in range(3 * MOST_RATES):
        view = watch.take(recorded(phase=("serving", "closing")[turn % 2]), float(turn), "12:00:00")
    assert (len(view.events), len(view.row_rates), len(view.batch_rates)) == (MOST_EVENTS, MOST_RATES, MOST_RATES)
    assert view.happened == 3 * MOST_RATES - 1


def test_a_line_of_text_tells_fill_rates_latency_and_who_is_blocked() -> None:
    report = blocked(2.5)
    text = line(view_of(report), "12:00:00")
    assert text.startswith("12:00:00 default, generation ")
    ring = report["ring"]
    for part in (
        f"window [{ring['tail']:,}, {ring['committed']:,})",
        "rows/s",
        "commit ",
        "grant ",
        "collectors blocked for 2.5 s",
        REASON,
    ):
        assert part in text
    assert "\n" not in text
