"""Figures as people read them: each in its own unit, short, and never rounded into a wrong one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from replay_server.status_text import status_lines
from replay_server.top.plain import percentiles
from replay_server.units import counted, human_bytes, human_count, human_seconds

RECORDED = Path(__file__).parents[1] / "support" / "recorded_report.json"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 µs"),
        (12.4e-6, "12 µs"),
        (0.9994e-3, "999 µs"),
        (0.9996e-3, "1.0 ms"),
        (3.36e-3, "3.4 ms"),
        (9.94e-3, "9.9 ms"),
        (9.96e-3, "10 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (1.16, "1.2 s"),
        (999.9, "999.9 s"),
        (1_000.0, "16.7 min"),
        (60_000.0, "17 h"),
    ],
)
def test_a_duration_is_shown_in_the_unit_of_its_size(seconds: float, shown: str) -> None:
    assert human_seconds(seconds) == shown


@pytest.mark.parametrize(
    ("n_bytes", "shown"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (180_006_912, "172 MiB"), (3 << 50, "3.07e+03 TiB")]
)
def test_bytes_have_a_binary_unit(n_bytes: int, shown: str) -> None:
    assert human_bytes(n_bytes) == shown


@pytest.mark.parametrize(("number", "shown"), [(None, "-"), (9_999_999, "9,999,999"), (10_000_000, "10 M"), (12_345_678_901, "12.35 G")])
def test_a_count_keeps_its_digits_as_long_as_they_fit(number: int | None, shown: str) -> None:
    assert human_count(number) == shown


@pytest.mark.parametrize(("number", "shown"), [(0, "0 copies"), (1, "1 copy"), (2_000, "2,000 copies")])
def test_one_thing_is_no_plural(number: int, shown: str) -> None:
    assert counted(number, "copy", "copies") == shown
    assert counted(number, "slot") == shown.replace("copies", "slots").replace("copy", "slot")


def test_latencies_of_status_and_top_are_no_bare_microseconds() -> None:
    report: dict[str, Any] = {**json.loads(RECORDED.read_text("utf-8")), "trace": {"state": "off"}}
    report["latency"] = {"commit_us": {"p50": 94.2, "p99": 3_300.0}, "grant_us": {"p50": 8_294.0, "p99": 1_234_000.0}}
    (line,) = (line for line in status_lines(report) if line.startswith("latency"))
    assert re.sub(" +", " ", line) == "latency commit p50 94 µs p99 3.3 ms, grant p50 8.3 ms p99 1.2 s"
    assert percentiles(report["latency"]["grant_us"]) == "8.3 ms/1.2 s"
    assert percentiles({"p50": None, "p99": None}) == "-"
