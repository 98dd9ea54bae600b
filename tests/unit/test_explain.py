"""Sentences about waits: nobody is called silent who has just been heard."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from replay_server.explain import Look


@dataclass
class Learner:
    heard_s: float
    is_stopped: bool = False

    def __str__(self) -> str:
        return "learner 'thinker' (pid 7)"

    @property
    def process(self) -> Any:
        return SimpleNamespace(is_stopped=lambda: self.is_stopped)


def who_learns(*learners: Learner) -> str:
    replay: Any = SimpleNamespace(
        sessions=SimpleNamespace(of=lambda _: list(learners)), requests=SimpleNamespace(oldest_of_each=lambda: [object()])
    )
    store: Any = None
    return Look(replay, store).who_learns


def test_a_learner_that_was_heard_just_now_is_not_called_silent() -> None:
    assert who_learns(Learner(time.monotonic() + 60)) == "1 of 1 learner waiting for rows"


@pytest.mark.parametrize(("heard_ago_s", "is_stopped"), [(7, False), (0, True)])
def test_a_learner_that_is_silent_or_stopped_is_named(heard_ago_s: float, is_stopped: bool) -> None:
    told = who_learns(Learner(time.monotonic() - heard_ago_s, is_stopped), Learner(time.monotonic() + 60))
    assert told.startswith(f"1 of 2 learners waiting for rows, silent longest is learner 'thinker' (pid 7), heard last {heard_ago_s}.")
