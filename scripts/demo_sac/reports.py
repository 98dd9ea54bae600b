"""What the demo's processes tell the main one, over one pipe each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Episodes:
    """Episodes that ended at one step of a collector, ``steps`` environment steps into the run (collectors keep pace)."""

    steps: int
    returns: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A process's work is done and committed. It stays attached until it is answered, so that the last status report shows it."""

    rows: int = 0  # written, by a collector
    updates: int = 0  # made, by the learner
