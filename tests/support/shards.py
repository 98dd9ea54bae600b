"""Servers of different sizes under one run directory, filled with marker rows, and the statistics of what was sampled from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from replay_server_client import Collector
from support.markers import MARKERS, marker_steps
from support.servers import ServerProcess

Counts = npt.NDArray[np.int64]

SIZES = {"s0": 100, "s1": 300, "s2": 600}
MOST_ROWS = max(SIZES.values())


def start_shards(start: Callable[..., ServerProcess], *options: str, sizes: Mapping[str, int] = SIZES) -> dict[str, ServerProcess]:
    """One server for each size, its rows written: shard i's rows are those of collector i, their steps from 0."""
    servers = {name: start("--capacity", "2000", "--slot-rows", "16", *options, name=name) for name in sizes}
    for shard, (name, rows) in enumerate(sizes.items()):
        fill(servers[name], shard, 0, rows)
    return servers


def fill(server: ServerProcess, shard: int, first_step: int, rows: int) -> None:
    fill_at(server.run_dir, server.name, shard, first_step, rows)


def fill_at(run_dir: Path, name: str, shard: int, first_step: int, rows: int) -> None:
    if rows:
        with Collector.connect(name, schema=MARKERS, run_dir=run_dir) as collector:
            collector.write(marker_steps(shard, 1, first_step, rows))
            collector.flush()


class Seen:
    """How often each row came, and how often each should have come by what every batch says it was drawn from."""

    def __init__(self, shards: int = len(SIZES)) -> None:
        self.counts = np.zeros((shards, MOST_ROWS), np.int64)
        self.expected = np.zeros((shards, MOST_ROWS))

    def add(self, batch: Any) -> None:
        shard, step = batch["collector"].cpu().numpy(), batch["step"].cpu().numpy()
        np.add.at(self.counts, (shard, step), 1)
        for row, size in zip(self.expected, batch.counts.sizes, strict=True):
            row[:size] += len(batch) / sum(batch.counts.sizes)

    @property
    def is_uniform(self) -> bool:
        """Pearson's chi-square within 5 standard deviations of its mean; nothing came that could not."""
        can = self.expected > 0
        counts, expected = self.counts[can], self.expected[can]
        return not self.counts[~can].any() and abs(self.chi_square - (len(counts) - 1)) < 5 * np.sqrt(2 * (expected.size - 1))

    @property
    def chi_square(self) -> float:
        can = self.expected > 0
        return float(((self.counts[can] - self.expected[can]) ** 2 / self.expected[can]).sum())


def run_dir_of(servers: Mapping[str, ServerProcess]) -> Path:
    return next(iter(servers.values())).run_dir
