"""The explorer on models small enough to be read: what it must find, it finds by the shortest way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from model.explore import BrokenPromise, explore


class Walk:
    """From 0 in steps of one or two up to ``end``, where it rests; ``forbidden`` breaks a promise, from ``trap`` nothing leads away."""

    def __init__(self, end: int, forbidden: int | None = None, trap: int | None = None) -> None:
        self.end, self.forbidden, self.trap = end, forbidden, trap

    def start(self) -> int:
        return 0

    def steps(self, state: int) -> Iterator[tuple[str, Callable[[], int]]]:
        for stride in (1, 2):
            if state + stride <= self.end and state != self.trap:
                yield f"from {state} by {stride}", lambda stride=stride: state + stride  # type: ignore[misc]

    def check(self, state: int) -> None:
        if state == self.forbidden:
            raise BrokenPromise(f"never {state}")

    def is_at_rest(self, state: int) -> bool:
        return state == self.end

    def what_waits(self, state: int) -> str:
        return f"{state} waits"


def test_every_state_is_seen_once() -> None:
    seen = explore(Walk(10))
    assert (seen.states, seen.transitions, seen.depth, seen.counterexample) == (11, 19, 5, None)


def test_a_broken_promise_is_told_with_the_shortest_schedule() -> None:
    found = explore(Walk(10, forbidden=4)).counterexample
    assert found is not None
    assert found.promise == "never 4"
    assert found.schedule == ("from 0 by 2", "from 2 by 2")
    assert str(found).splitlines()[1] == "  1. from 0 by 2"


def test_a_dead_end_is_told_though_every_promise_is_kept() -> None:
    found = explore(Walk(10, trap=3)).counterexample
    assert found is not None
    assert found.promise == "from here on somebody waits for ever: 3 waits"
    assert len(found.schedule) == 2


def test_a_world_that_is_not_small_is_given_up() -> None:
    with pytest.raises(RuntimeError, match="more than 5 states"):
        explore(Walk(10), most_states=5)
