"""Moments, returns, episodes, versions and what was not finite, from ingress alone: end to end on a real server."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from json import loads
from typing import Any

import jsonschema
import numpy as np
import pytest
from replay_server_client import Collector, Learner, Schema, SchemaMismatch
from replay_server_client.scalars import scalars
from support.mail import wait_mail
from support.reports import report_of
from support.servers import ServerProcess

SCHEMA = Schema.of(obs=("float32", 2), reward="float32", terminated="bool", policy_version="int32")
FORM = loads(files("replay_server").joinpath("status_report.schema.json").read_text("utf-8"))
Start = Callable[..., ServerProcess]


def steps(reward: list[float], terminated: list[bool]) -> dict[str, Any]:
    n = len(reward)
    return {"obs": np.zeros((n, 2), np.float32), "reward": np.array(reward, np.float32), "terminated": np.array(terminated)}


def report(server: ServerProcess) -> dict[str, Any]:
    found = report_of(server)
    jsonschema.Draft202012Validator(FORM).validate(found)
    return found


def test_returns_and_episodes_of_several_collectors_are_merged(start_server: Start) -> None:
    server = start_server("--capacity", "100", "--slot-rows", "4", "--moments", "reward,return", "--return-gamma", "0.5")
    connect = {"schema": SCHEMA, "run_dir": server.run_dir}
    with (
        Collector.connect(server.name, name="a", lanes=2, **connect) as a,  # type: ignore[arg-type]
        Collector.connect(server.name, name="b", **connect) as b,  # type: ignore[arg-type]
    ):
        before = report(server)
        assert before["episodes"]["count"] == 0
        assert before["moments"]["return"] == {"count": 0, "mean": None, "std": None, "min": None, "max": None}
        a.write(steps([1, 10, 1, 10, 1, 10], [False, False, False, True, True, False]))  # ends: lane 1 (20, 2 rows), lane 0 (3, 3 rows)
        a.cut(1)
        a.write(steps([5, 7, 5, 7], [False, False, True, True]))  # ends: lane 0 (10, 2 rows); lane 1 was cut
        a.flush()
        b.write(steps([4], [True]))
        b.flush()
        found = report(server)
        first, second = (c["episodes"] for c in found["collectors"])
        assert (first["count"], first["return"]["mean"], first["length"]["max"]) == (3, 11, 3)
        assert (second["count"], second["last"]) == (1, {"count": 1, "mean_return": 4, "mean_length": 1})
        assert (found["episodes"]["count"], found["episodes"]["last"]["mean_return"]) == (4, pytest.approx(37 / 4))
        discounted = [1, 10, 1.5, 15, 1.75, 10, 5, 7, 7.5, 10.5, 4]
        returns = found["moments"]["return"]
        assert (returns["count"], returns["mean"], returns["max"]) == (11, pytest.approx(np.mean(discounted)), 15)
        flat = scalars(found)
        assert (flat["replay/episodes/return/mean"], flat["replay/ring/fill"]) == pytest.approx((37 / 4, 0.11))


def test_rows_are_stamped_with_the_version_taken_and_their_staleness_is_told(start_server: Start) -> None:
    server = start_server("--capacity", "100")
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu") as learner,
    ):
        collector.write(steps([0], [False]))
        collector.flush()
        assert report(server)["staleness"] == {"buckets": [], "mean": None, "max": None}
        for value in range(3):
            learner.post("policy", {"w": np.full(2, value)})
        assert wait_mail(collector, newer_than=2)[0] == collector.policy_version == 3
        collector.write(steps([0, 0], [False, False]))
        collector.flush()
        learner.post("policy", {"w": np.zeros(2)})
        collector.write(steps([0], [False]))
        collector.flush()
        staleness = report(server)["staleness"]
        assert staleness == {"buckets": [{"le": 0, "rows": 2}, {"le": 1, "rows": 1}], "mean": pytest.approx(1 / 3), "max": 1}


@pytest.mark.parametrize("policy", ["reject", "count"])
def test_a_row_that_is_not_finite_is_named_with_collector_and_field(start_server: Start, policy: str) -> None:
    server = start_server("--capacity", "100", "--nonfinite", policy, "--finite", "reward,obs")
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, name="walker") as collector:
        collector.write(steps([0, 0], [False, False]))
        collector.flush()
        assert report(server)["collectors"][0]["last_nonfinite"] is None
        for _ in range(3):
            rows = steps([0, 0], [False, False])
            rows["obs"][1, 1] = np.inf
            collector.write(rows)
            collector.flush()
        walker = report(server)["collectors"][0]
        assert walker["last_nonfinite"] == {"field": "obs", "row": 7}
        assert walker["rejected_rows" if policy == "reject" else "nonfinite_rows"] == 3
    server.stop()
    told = [line for line in server.child.output.splitlines() if "NaN or infinite" in line]
    assert len(told) == 1
    assert "'walker'" in told[0]
    assert "'obs'" in told[0]
    assert "row 3" in told[0]


def test_return_without_a_reward_is_refused_by_name(start_server: Start) -> None:
    server = start_server("--capacity", "100", "--moments", "return")
    with pytest.raises(SchemaMismatch, match=r"--moments return: .*role reward"):
        Collector.connect(server.name, schema=Schema.of(x="float32"), run_dir=server.run_dir)


def test_a_schema_without_the_roles_has_no_episodes_and_no_staleness(start_server: Start) -> None:
    server = start_server("--capacity", "100")
    with Collector.connect(server.name, schema=Schema.of(reward="float32"), run_dir=server.run_dir):
        found = report(server)
        assert (found["episodes"], found["staleness"], found["collectors"][0]["episodes"]) == (None, None, None)
