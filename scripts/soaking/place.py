"""Where the clients of a soak connect, and at which pace they work."""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE_S = 60.0
"""A call that waits longer is stuck: its ReplayTimeout is a fault."""


@dataclass(frozen=True)
class Place:
    """``pace_s``: the fast collector's pause after each write; ``update_s``: a learner's pause after each batch."""

    name: str
    run_dir: str
    device: str
    seed: int
    pace_s: float
    update_s: float
