"""Which servers a host is to have, and what becomes of one that ended."""

from __future__ import annotations

import pytest
from replay_server_protocol.errors import InvalidRequest

from replay_server.host import Plan, devices_of, plans_of


def test_servers_are_named_by_place_and_trace_to_files_of_their_own() -> None:
    plans = plans_of("train", ["cuda:0", "cuda:3"], {"capacity": "9", "trace": "/x/t.json", "max_learners": "2"})
    assert plans == [
        Plan("train-0", "cuda:0", ("--capacity", "9", "--trace", "/x/t-0.json", "--max-learners", "2")),
        Plan("train-1", "cuda:3", ("--capacity", "9", "--trace", "/x/t-1.json", "--max-learners", "2")),
    ]


def test_gpus_are_all_or_those_named() -> None:
    assert devices_of("all", lambda: 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices_of("2,0", lambda: 3) == ["cuda:2", "cuda:0"]


@pytest.mark.parametrize("gpus", ["3", "0,0", "", "0,", "-1", "some", "1.5"])
def test_gpus_that_are_not_there_are_refused(gpus: str) -> None:
    with pytest.raises(InvalidRequest, match="--gpus"):
        devices_of(gpus, lambda: 3)
