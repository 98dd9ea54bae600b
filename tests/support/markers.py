"""Marker rows: every row says who wrote it, in which lane, as which one, and repeats that in a second field, so it can be judged alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from replay_server_protocol.schema import Schema

MARKERS = Schema.of(collector="int32", lane="int32", step="int64", reward="float32", check=("int64", 4))
_FACTORS = np.array([1, -1, 3, 7], np.int64)


def marker_steps(collector: int, lanes: int, first_step: int, steps: int) -> dict[str, npt.NDArray[Any]]:
    """``steps`` whole steps of all lanes, time-major."""
    lane = np.tile(np.arange(lanes, dtype=np.int32), steps)
    step = np.repeat(np.arange(first_step, first_step + steps, dtype=np.int64), lanes)
    return {
        "collector": np.full(len(step), collector, np.int32),
        "lane": lane,
        "step": step,
        "reward": (step % 1000).astype(np.float32),
        "check": check_of(collector, lane, step),
    }


def check_of(collector: Any, lane: Any, step: Any) -> npt.NDArray[np.int64]:
    """What ``check`` must hold in a whole row."""
    mixed = np.asarray(step, np.int64) * 1_000_003 + np.asarray(lane, np.int64) * 1009 + np.asarray(collector, np.int64)
    result: npt.NDArray[np.int64] = mixed[..., None] * _FACTORS
    return result


def is_whole(rows: Any) -> npt.NDArray[np.bool_]:
    """Which rows of a batch (a mapping of arrays or tensors) are whole: not torn, not empty, not another row's."""
    collector, lane, step, check = (np.asarray(rows[name]) for name in ("collector", "lane", "step", "check"))
    whole: npt.NDArray[np.bool_] = (check == check_of(collector, lane, step)).all(1) & (np.asarray(rows["reward"]) == step % 1000)
    return whole
