"""Every schedule of a model, breadth first: the shortest one that breaks a promise, or proof that none does.

A model says what may happen in a state; the explorer keeps each state once. When nothing is left to visit, it looks back from the states
of rest: a state from which no schedule leads to rest is a dead end, and somebody in it waits for ever.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)

MOST_STATES = 400_000
"""An exploration that comes to so many states gives up: it is not small."""


class BrokenPromise(Exception):
    """A step did what must never happen."""


class Explorable(Protocol[S]):
    """What can be explored. ``steps`` may give a label with what it does; doing it, and ``check``, may raise BrokenPromise."""

    def start(self) -> S: ...

    def steps(self, state: S) -> Iterable[tuple[str, Callable[[], S]]]: ...

    def check(self, state: S) -> None: ...

    def is_at_rest(self, state: S) -> bool: ...

    def what_waits(self, state: S) -> str: ...


@dataclass(frozen=True)
class Counterexample:
    """The shortest schedule to a broken promise, as sentences."""

    promise: str
    schedule: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{number:3}. {step}" for number, step in enumerate(self.schedule, 1)]
        return "\n".join([f"broken after {len(self.schedule)} steps: {self.promise}", *lines])


@dataclass(frozen=True)
class Exploration:
    """What was seen. With a counterexample it is only the states up to it."""

    states: int
    transitions: int
    depth: int
    counterexample: Counterexample | None

    def __str__(self) -> str:
        seen = f"{self.states:,} states, {self.transitions:,} transitions, depth {self.depth}"
        return seen if self.counterexample is None else f"{seen}\n{self.counterexample}"


class _Search(Generic[S]):
    """The states found so far, in the order of their distance, each with the step that led to it first."""

    def __init__(self, model: Explorable[S]) -> None:
        self.model = model
        first = model.start()
        self.states = [first]
        self.index = {first: 0}
        self.parents = [0]
        self.labels = [""]
        self.depths = [0]
        self.edges_from, self.edges_to = array("l"), array("l")

    def run(self, most_states: int) -> Counterexample | None:
        at = 0
        while at < len(self.states):
            broken = self._expand(at)
            if broken is not None:
                return broken
            if len(self.states) > most_states:
                raise RuntimeError(f"more than {most_states:,} states at depth {self.depths[at]}: choose smaller sizes")
            at += 1
        return self._dead_end()

    def _expand(self, at: int) -> Counterexample | None:
        for label, step in self.model.steps(self.states[at]):
            try:
                after = step()
                to = self.index.get(after)
                if to is None:
                    self.model.check(after)
            except BrokenPromise as broken:
                return Counterexample(str(broken), (*self._schedule(at), label))
            if to is None:
                to = self.index[after] = len(self.states)
                self.states.append(after)
                self.parents.append(at)
                self.labels.append(label)
                self.depths.append(self.depths[at] + 1)
            self.edges_from.append(at)
            self.edges_to.append(to)
        return None

    def _schedule(self, at: int) -> tuple[str, ...]:
        steps = []
        while at:
            steps.append(self.labels[at])
            at = self.parents[at]
        return tuple(reversed(steps))

    def _dead_end(self) -> Counterexample | None:
        """The nearest state from which nothing leads to rest, and better one from which nothing leads anywhere."""
        before: list[list[int]] = [[] for _ in self.states]
        for one, other in zip(self.edges_from, self.edges_to, strict=True):
            before[other].append(one)
        can_rest = [self.model.is_at_rest(state) for state in self.states]
        known = [at for at, rests in enumerate(can_rest) if rests]
        while known:
            for at in before[known.pop()]:
                if not can_rest[at]:
                    can_rest[at] = True
                    known.append(at)
        if all(can_rest):
            return None
        moves = {one for one, other in zip(self.edges_from, self.edges_to, strict=True) if one != other}
        dead = [at for at, can in enumerate(can_rest) if not can]
        at = next((at for at in dead if at not in moves), dead[0])
        return Counterexample(f"from here on somebody waits for ever: {self.model.what_waits(self.states[at])}", self._schedule(at))


def explore(model: Explorable[S], most_states: int = MOST_STATES) -> Exploration:
    """Visits every reachable state. Raises RuntimeError if there are more than ``most_states``."""
    search = _Search(model)
    collects = gc.isenabled()
    gc.disable()  # states hold no cycles, and looking for some among so many tuples takes longer than all the rest
    try:
        found = search.run(most_states)
    finally:
        if collects:
            gc.enable()
    return Exploration(len(search.states), len(search.edges_to), max(search.depths), found)
