"""A collector without a server: rows leave by a bounded multiprocessing queue, the policy comes by shared memory. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from replay_server_client import Schema

DEPTH = 2
"""Blocks of a collector on their way at once, as many as a collector of the server has slots."""

Rows = dict[str, NDArray[Any]]
Layout = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass
class Wires:
    """What the trainer shares with its collectors. ``rows`` carries blocks, then None once from each collector."""

    rows: Queue[Rows | None]
    weights: SynchronizedArray[float]
    version: Synchronized[int]
    layout: Layout

    @classmethod
    def of(cls, collectors: int, weights: Mapping[str, NDArray[np.float32]]) -> Wires:
        context = get_context("spawn")
        layout = tuple((name, array.shape) for name, array in weights.items())
        elements = sum(array.size for array in weights.values())
        return cls(context.Queue(DEPTH * collectors), context.Array("f", elements), context.Value("q", 0), layout)

    def post(self, weights: Mapping[str, NDArray[np.float32]]) -> None:
        with self.weights.get_lock():
            self._flat()[:] = np.concatenate([weights[name].ravel() for name, _ in self.layout])
            self.version.value += 1

    def latest(self, newer_than: int) -> tuple[int, Rows] | None:
        if self.version.value <= newer_than:
            return None
        with self.weights.get_lock():
            flat, version = self._flat().copy(), self.version.value
        starts = np.cumsum([0, *(int(np.prod(shape)) for _, shape in self.layout)])
        pieces = zip(self.layout, starts[:-1], starts[1:], strict=True)
        return version, {name: flat[start:stop].reshape(shape) for (name, shape), start, stop in pieces}

    def _flat(self) -> NDArray[np.float32]:
        return np.frombuffer(self.weights.get_obj(), np.float32)


class PlainCollector:
    """Stands where a Collector stands. Sends blocks of ``block_rows`` rows; a full queue makes it wait."""

    def __init__(self, wires: Wires, schema: Schema, block_rows: int) -> None:
        self._wires = wires
        self._schema = schema
        self._block_rows = block_rows
        self._kept: list[Rows] = []
        self._n = 0

    def write(self, rows: Mapping[str, NDArray[Any]], *, mask: NDArray[np.bool_]) -> None:
        kept = {field.name: np.asarray(rows[field.name], field.numpy_dtype)[mask] for field in self._schema}
        self._kept.append(kept)
        self._n += int(mask.sum())
        if self._n >= self._block_rows:
            self._send()

    def latest(self, mailbox: str, newer_than: int = 0) -> tuple[int, Rows] | None:
        return self._wires.latest(newer_than)

    def flush(self, timeout: float) -> None:
        """The last word of this collector."""
        if self._n:
            self._send()
        self._wires.rows.put(None, timeout=timeout)

    def _send(self) -> None:
        self._wires.rows.put({name: np.concatenate([rows[name] for rows in self._kept]) for name in self._schema.names})
        self._kept, self._n = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._wires.rows.close()
