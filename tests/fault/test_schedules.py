"""Seeded schedules of faults: whoever is killed, stopped, forked, closed or restarted wherever on the data path, the promises hold.

Each seed draws a small cast and one to four faults (support/fault_schedules.py) and plays them with real processes (fault_stage.py). After
it: rows conserved exactly, credits and leases back within a second, the dead buried, nobody else kept waiting, rows whole and in order,
links right, nothing left, the status true, and after a restart everybody going on within two seconds while old messages are refused.

``pytest tests/fault/test_schedules.py --seed 7`` plays seed 7 alone and prints what it means if it fails; REPLAY_TEST_ALL=1 plays 1,000.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from support.fault_run import outcomes, told
from support.fault_schedules import LEARNER_POINTS, SERVER_POINTS, draw
from support.leaks import nothing_left
from support.processes import Children

FEW, ALL = range(6), range(1000)
STAGES = 3

Outcomes = dict[int, dict[str, Any]]


def seeds_of(config: pytest.Config) -> list[int]:
    chosen: list[int] = config.getoption("--seed")
    return chosen or list(ALL if os.environ.get("REPLAY_TEST_ALL") else FEW)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", seeds_of(metafunc.config))


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Outcomes:
    """All seeds, several at a time: most of a schedule is waiting."""
    with nothing_left(), Children() as children:
        return {outcome["seed"]: outcome for outcome in outcomes(children, seeds_of(request.config), STAGES)}


@pytest.mark.timeout(7200)
def test_every_promise_holds_through_the_faults_of(seed: int, played: Outcomes) -> None:
    assert not played[seed]["broken"], told(played[seed])


def test_a_seed_means_the_same_every_time() -> None:
    assert [draw(seed) for seed in FEW] == [draw(seed) for seed in FEW]


def test_the_schedules_come_to_every_kind_of_fault_and_to_every_point() -> None:
    faults = [fault for seed in ALL for fault in draw(seed).faults]
    assert {fault.what for fault in faults} == {"kill", "stop", "fork", "close", "restart"}
    assert {fault.how for fault in faults} > {"kill", "term", "uses", "exits", "killed", "outlives"}
    assert {fault.point for fault in faults} > {*LEARNER_POINTS, *SERVER_POINTS}
