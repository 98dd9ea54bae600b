"""The simulation drives the real delivery and router: what they promise holds there too."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def simulation() -> Iterator[dict[str, Any]]:
    """The script's names, which no package holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield vars(importlib.import_module("simulate_scale"))


def test_killed_hosts_cost_time_and_no_publish(simulation: dict[str, Any]) -> None:
    whole = simulation["ingest"](simulation["Costs"](), seconds=2.0)
    killed = simulation["ingest"](simulation["Costs"](restart_s=0.4), seconds=2.0, kills_s=(0.5, 1.2))
    assert killed["parts_sent_again"] > 0
    assert 0.3 * whole["parts"] < killed["parts"] < 0.8 * whole["parts"]


def test_a_sidecar_that_commits_nothing_holds_its_senders_back_and_loses_nothing(simulation: dict[str, Any]) -> None:
    costs = simulation["Costs"](deliver_wait_s=0.1)
    found = simulation["ingest"](costs, seconds=2.0, slots=64, stalled_s=(0.5, 1.5))
    still = [rate for time_s, rate in found["bytes_per_s_over_time"] if 0.6 < time_s < 1.5]
    assert not any(still), "nothing is committed meanwhile"
    assert found["bytes_per_s_over_time"][-1][1] > 0
    assert 0 <= found["published_parts"] - found["parts"] <= 64, "no more is published than there are credits"


def test_a_window_of_four_hides_latency(simulation: dict[str, Any]) -> None:
    costs = simulation["Costs"](latency_s=0.005)
    one, four = (simulation["ingest"](costs, window=window, seconds=1.0)["mib_per_s"] for window in (1, 4))
    assert four > 3 * one


def test_draws_from_a_hundred_shards_are_as_far_from_uniform_as_chance_makes_them(simulation: dict[str, Any]) -> None:
    found = simulation["sample"](simulation["Costs"](), 100, batches=20)
    assert found["error_bound"] == 0
    assert found["drawn_error"] < 1.3 * found["chance"]


def test_shards_that_are_lost_cost_one_slow_batch_and_no_uniformity(simulation: dict[str, Any]) -> None:
    found = simulation["sample"](simulation["Costs"](), 50, batches=20, lose_share=0.1)
    assert found["epochs"] > 50
    assert found["slowest_batch_s"] > 1.8
    assert found["drawn_error"] < 1.5 * found["chance"]
