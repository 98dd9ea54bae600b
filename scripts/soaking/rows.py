"""Marker rows: every field of a row follows from its producer, lane and step, so whoever samples it can judge it alone.

A producer is one session of a collector; in each of its lanes the steps of the rows that were taken are 0, 1, 2 … without a gap. The
same arithmetic runs on numpy arrays (collectors) and torch tensors (learners); rewards and the discount are exact in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from replay_server_client import Schema

CHECK = 48
GAMMA = 0.5
SCHEMA = Schema.of(
    producer="int32",
    lane="int32",
    step="int64",
    obs=("float32", 4),
    check=("int64", CHECK),
    reward="float32",
    next_obs=("float32", 4),
    terminated="bool",
    truncated="bool",
    tail=("int64", CHECK),
)
"""``check`` and ``tail`` lie apart, 384 bytes each: a row copied or gathered in part shows in one of them."""

_TERMINATES_EVERY, _TRUNCATES_EVERY = 37, 53
_FLOAT_STEPS = 1 << 20
Rows = dict[str, npt.NDArray[Any]]


def mark_of(producer: Any, lane: Any, step: Any) -> Any:
    """The number that ``check`` and ``tail`` repeat, int64."""
    return step * 1_000_003 + lane * 1009 + producer * 7_368_787


def reward_of(lane: Any, step: Any) -> Any:
    """A small whole number."""
    return (step * 7 + lane) % 11 - 5


def is_terminated(producer: Any, step: Any) -> Any:
    return (step + producer) % _TERMINATES_EVERY == 0


def is_truncated(producer: Any, step: Any) -> Any:
    return ~is_terminated(producer, step) & ((step + producer) % _TRUNCATES_EVERY == 0)


def has_ended(producer: Any, step: Any) -> Any:
    return is_terminated(producer, step) | is_truncated(producer, step)


def observed(producer: Any, lane: Any, step: Any) -> tuple[Any, Any, Any, Any]:
    """The four numbers of ``obs`` at ``step``, each exact in float32; ``next_obs`` is that of the step after."""
    return producer % _FLOAT_STEPS, lane, step % _FLOAT_STEPS, step // _FLOAT_STEPS


def make_rows(producer: int, lanes: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]) -> Rows:
    """The rows of ``lanes[i]`` at ``steps[i]``."""
    mark = mark_of(producer, lanes, steps)
    spread = np.arange(1, CHECK + 1)
    return {
        "producer": np.full(len(steps), producer, np.int32),
        "lane": lanes.astype(np.int32),
        "step": steps,
        "obs": _floats(observed(producer, lanes, steps)),
        "check": mark[:, None] * spread,
        "reward": reward_of(lanes, steps).astype(np.float32),
        "next_obs": _floats(observed(producer, lanes, steps + 1)),
        "terminated": is_terminated(producer, steps),
        "truncated": is_truncated(producer, steps),
        "tail": mark[:, None] - spread,
    }


def _floats(parts: tuple[Any, ...]) -> npt.NDArray[np.float32]:
    return np.stack(np.broadcast_arrays(*parts), axis=1).astype(np.float32)
