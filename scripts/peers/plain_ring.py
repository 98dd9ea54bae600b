"""A replay ring without a server: one tensor a field in the trainer's own process, as most single-GPU trainers keep it.

The trainer takes blocks from its collectors' queue between two updates, copies them to the device, draws uniformly and gathers field by
field. Rows and draws are tied together as the server ties them, so that both sides make the same number of updates for each row.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from peers.plain_collector import Rows, Wires
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pacing:
    """As the server's options of these names; ``last_sample`` is the number of the batch that waits for every row."""

    learning_starts: int
    samples_per_insert: float
    tolerance_rows: float
    last_sample: int


@dataclass(frozen=True, slots=True)
class PlainBatch:
    fields: Mapping[str, Tensor]


class PlainRing:
    """Stands where a Learner stands: ``sample``, ``post``, and the ring between them."""

    def __init__(self, wires: Wires, collectors: int, capacity: int, pacing: Pacing, device: str, timeout: float) -> None:
        self._wires = wires
        self._collectors = collectors
        self._capacity = capacity
        self._pacing = pacing
        self._device = torch.device(device)
        self._timeout = timeout
        self._ring: dict[str, Tensor] = {}
        self._inserted = self._sampled = self._samples = self._finished = 0

    def sample(self, n: int, timeout: float) -> PlainBatch:
        """Raises queue.Empty when no collector sends rows that are needed."""
        while self._can_insert and self._take(wait=False):
            pass
        while not self._can_sample(n):
            self._take(wait=True)
        self._samples += 1
        self._sampled += n
        if self._samples == self._pacing.last_sample:
            while self._finished < self._collectors:
                self._take(wait=True)
        index = torch.randint(min(self._inserted, self._capacity), (n,), device=self._device)
        return PlainBatch({name: column.index_select(0, index) for name, column in self._ring.items()})

    def post(self, mailbox: str, weights: Mapping[str, NDArray[np.float32]]) -> None:
        self._wires.post(weights)

    @property
    def _credit_rows(self) -> float:
        """Rows that may be drawn beyond those that were; negative when draws are ahead."""
        return (self._inserted - self._pacing.learning_starts) * self._pacing.samples_per_insert - self._sampled

    @property
    def _can_insert(self) -> bool:
        return self._credit_rows <= self._pacing.tolerance_rows

    def _can_sample(self, n: int) -> bool:
        return self._inserted >= self._pacing.learning_starts and self._credit_rows - n >= -self._pacing.tolerance_rows

    def _take(self, *, wait: bool) -> bool:
        """Takes one block in. False when none is there, and that was not waited for."""
        try:
            rows = self._wires.rows.get(wait, self._timeout if wait else None)
        except queue.Empty:
            if wait:
                raise
            return False
        if rows is None:
            self._finished += 1
        else:
            self._insert(rows)
        return True

    def _insert(self, rows: Rows) -> None:
        if not self._ring:
            self._ring = {name: self._column(array) for name, array in rows.items()}
        n = len(next(iter(rows.values())))
        start = self._inserted % self._capacity
        first = min(n, self._capacity - start)
        for name, array in rows.items():
            block = torch.from_numpy(array).to(self._device, non_blocking=True)
            self._ring[name][start : start + first] = block[:first]
            if first < n:
                self._ring[name][: n - first] = block[first:]
        self._inserted += n

    def _column(self, array: NDArray[Any]) -> Tensor:
        like = torch.from_numpy(array)
        return torch.zeros((self._capacity, *array.shape[1:]), dtype=like.dtype, device=self._device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
