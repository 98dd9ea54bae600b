"""The metrics as Prometheus reads them: well formed, named by its rules, all there from the start, bounded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the extra `export` is not installed")

from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from replay_server.counters import WAIT_BOUNDS_S
from replay_server.export.metrics import PREFIX, registry_of
from replay_server.export.record import Look, Record

CHECKOUT = Path(__file__).parents[2]
UNITS = ("seconds", "bytes", "ratio", "rows", "slots", "messages", "batches", "sessions", "leases", "credits", "connections")
NO_UNIT = {"up", "build_info", "looks", "restarts", "phase", "flow_state", "leases_revoked", "batches_granted", "batches_dropped"}
NO_UNIT |= {"sessions_opened", "sessions_lost", "collectors", "learners"}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def served(**parts: Any) -> dict[str, Any]:
    counts = [0] * (len(WAIT_BOUNDS_S) + 1)
    counts[3], counts[-1] = 5, 1
    return {
        "report_version": 1,
        "generation": 7,
        "phase": "serving",
        "uptime_s": 12.5,
        "schema": {"stride_bytes": 64},
        "ring": {"committed": 300, "tail": 200, "size_rows": 100, "capacity_rows": 200},
        "counters": {"rows_committed": 300, "batches_granted": 4},
        "flow": {"state": "free", "samples_per_insert": None, "time_in_state_s": {"free": 12.5}},
        "histograms": {"commit": {"sum_s": 20.5, "counts": counts}},
        "collectors": [{"name": 'a"\n\\b', "pid": 1, "committed_rows": 300, "rejected_rows": 0, "credits": 2, "waiting_s": 0.5}],
        "learners": [],
        **parts,
    }


def record_of(*reports: dict[str, Any] | None, most_names: int = 8) -> Record:
    record = Record(1.0, most_names)
    for second, report in enumerate(reports):
        record.see(Look(1000.0 + second, float(second), report))
    return record


def text_of(record: Record, accept: str = "") -> str:
    encode, _ = choose_encoder(accept)
    return encode(registry_of(record)).decode()


def samples_of(record: Record) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(text_of(record))
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value_of(record: Record, name: str, **labels: str) -> float:
    return samples_of(record)[f"{PREFIX}{name}", tuple(sorted(labels.items()))]


@pytest.mark.parametrize("reports", [(), (served(),), (served(), None)], ids=["never", "served", "gone"])
def test_names_follow_the_rules(reports: tuple[dict[str, Any] | None, ...]) -> None:
    families = list(text_string_to_metric_families(text_of(record_of(*reports))))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        name = family.name.removeprefix(PREFIX)
        assert family.name.startswith(PREFIX)
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", name), name
        assert name.rpartition("_")[2] in UNITS or name in NO_UNIT, f"{name} has no unit"
        assert not re.search(r"(_us|_ms|_ns|milli|micro|_count|_sum|_bucket|_total)$", name), name
        assert family.documentation.endswith("."), name
        assert family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total"), sample.name
            assert set(sample.labels) <= {"version", "result", "phase", "state", "collector", "learner", "le"}


def test_openmetrics_is_well_formed_too() -> None:
    families = {family.name for family in parse_openmetrics(text_of(record_of(served()), OPENMETRICS))}
    assert f"{PREFIX}commit_duration_seconds" in families


def test_every_series_is_there_at_zero_before_the_first_report() -> None:
    before, after = samples_of(record_of()), samples_of(record_of(served(collectors=[])))
    assert set(before) == set(after)
    assert {name for (name, _), value in before.items() if value} == {f"{PREFIX}build_info"}


def test_values_are_those_of_the_report() -> None:
    record = record_of(served())
    assert value_of(record, "up") == 1
    assert value_of(record, "ring_fill_ratio") == 0.5
    assert value_of(record, "committed_bytes_total") == 300 * 64
    assert value_of(record, "phase", phase="serving") == 1
    assert value_of(record, "flow_state_seconds_total", state="free") == 12.5
    assert value_of(record, "collector_committed_rows_total", collector='a"\n\\b') == 300


def test_buckets_are_cumulative_and_end_with_all() -> None:
    record = record_of(served())
    below = [
        value
        for (name, labels), value in sorted(samples_of(record).items(), key=lambda sample: float(dict(sample[0][1]).get("le", "nan")))
        if name == f"{PREFIX}commit_duration_seconds_bucket"
    ]
    assert below == [0, 0, 0, *[5] * (len(WAIT_BOUNDS_S) - 3), 6]
    assert value_of(record, "commit_duration_seconds_count") == 6
    assert value_of(record, "commit_duration_seconds_sum") == 20.5


def test_while_the_server_is_away_gauges_are_zero_and_counters_stay() -> None:
    record = record_of(served(), None)
    assert value_of(record, "up") == 0
    assert value_of(record, "ring_size_rows") == 0
    assert value_of(record, "collectors") == 0
    assert value_of(record, "committed_rows_total") == 300
    assert value_of(record, "commit_duration_seconds_count") == 6
    assert value_of(record, "looks_total", result="absent") == 1


def test_a_thousand_client_names_make_no_more_series_than_the_limit() -> None:
    crowd = [{"name": f"c{n}", "pid": n, "committed_rows": 1, "rejected_rows": 0, "credits": 2, "waiting_s": 0.0} for n in range(1000)]
    record = record_of(*(served(collectors=crowd[start : start + 100]) for start in range(0, 1000, 100)), most_names=8)
    named = {labels for name, labels in samples_of(record) if name == f"{PREFIX}collector_committed_rows_total"}
    assert len(named) == 9
    assert value_of(record, "collector_committed_rows_total", collector="other") == 992
    assert value_of(record, "collector_credits", collector="other") == 200  # the last hundred, attached now


def test_the_page_of_the_exporter_names_every_metric_and_no_other() -> None:
    families = text_string_to_metric_families(text_of(record_of()))
    exported = {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
    told = set(re.findall(r"`(replay_server_\w+)`", (CHECKOUT / "docs" / "export.md").read_text("utf-8")))
    assert told == exported
