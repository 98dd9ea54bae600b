"""Numbered rows: each tells its collector, its lane, its number among that collector's rows and its step in the lane, and the rest follows.

``number`` counts the rows a collector keeps and ``step`` those of a lane, both for ever: so order, gaps, doubles and links show by
themselves, over all sessions and generations.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
from replay_server_protocol.schema import Schema

_WIDTH = 24
NUMBERED = Schema.of(
    collector="int32",
    lane="int32",
    number="int64",
    step="int64",
    next_step="int64",
    reward="float32",
    terminated="bool",
    wide=("int64", _WIDTH),
)
Rows = dict[str, npt.NDArray[Any]]


class Numbering:
    """Makes the next rows of one collector."""

    def __init__(self, collector: int, lanes: int, rng: random.Random, p_masked: float) -> None:
        self._collector = collector
        self._lanes = lanes
        self._rng = np.random.default_rng(rng.getrandbits(32))
        self._p_masked = p_masked
        self._number = 0
        self._steps = np.zeros(lanes, np.int64)

    def steps(self, n: int) -> tuple[Rows, npt.NDArray[np.bool_] | None]:
        """``n`` whole steps, time-major, and which rows are kept (None: all). A row that isn't kept holds numbers of no row."""
        rows = n * self._lanes
        keep = self._rng.random(rows) >= self._p_masked
        number = np.where(keep, self._number + np.cumsum(keep) - 1, -1)
        kept = keep.reshape(n, self._lanes)
        step = np.where(kept, self._steps + np.cumsum(kept, 0) - 1, -1).reshape(rows)
        self._number += int(keep.sum())
        self._steps += kept.sum(0)
        lane = np.tile(np.arange(self._lanes, dtype=np.int32), n)
        return _rows(self._collector, lane, number, step), (keep if self._p_masked else None)


def _rows(collector: int, lane: npt.NDArray[np.int32], number: npt.NDArray[np.int64], step: npt.NDArray[np.int64]) -> Rows:
    return {
        "collector": np.full(len(lane), collector, np.int32),
        "lane": lane,
        "number": number,
        "step": step,
        "next_step": step + 1,
        "reward": (step % 1000).astype(np.float32),
        "terminated": (step % 17 == 16),
        "wide": _wide(collector, lane, number, step),
    }


def _wide(collector: Any, lane: Any, number: Any, step: Any) -> npt.NDArray[np.int64]:
    mixed = (np.asarray(number, np.int64) * 1_000_003 + step) * 64 + np.asarray(collector, np.int64) * 1009 + lane
    wide: npt.NDArray[np.int64] = mixed[..., None] * (2 * np.arange(_WIDTH) + 1) + np.arange(_WIDTH)
    return wide


def broken(rows: Any, steps: Any = 1) -> npt.NDArray[np.bool_]:
    """Which rows (a mapping of arrays or tensors of any leading shape) are torn, empty, masked out or otherwise no row that was written.

    ``steps``: how many steps each one spans, of n-step transitions.
    """
    collector, lane, number, step = (np.asarray(rows[name]) for name in ("collector", "lane", "number", "step"))
    is_whole = (np.asarray(rows["wide"]) == _wide(collector, lane, number, step)).all(-1) & (number >= 0) & (step >= 0)
    is_whole &= np.asarray(rows["next_step"]) == step + steps
    is_whole &= (np.asarray(rows["reward"]) == step % 1000) & (np.asarray(rows["terminated"]) == (step % 17 == 16))
    wrong: npt.NDArray[np.bool_] = ~is_whole
    return wrong


def is_continuous(collectors: npt.NDArray[Any], numbers: npt.NDArray[Any]) -> bool:
    """Whether rows in the order of the ring hold each collector's rows in its order, none missing in between and none twice."""
    return all((np.diff(numbers[collectors == collector]) == 1).all() for collector in np.unique(collectors))
