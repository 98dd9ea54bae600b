"""The other side of bench_ipc.py: the single-GPU replay of ``uni_rl`` (PyPI: unilab-rl==1.4.15; ``pip install --no-deps`` is enough).

Same shape as ours: its fields have 430 float32 a row, its collector is a process of its own where ours is one. Only its public
ReplayBuffer and GPUResidentReplayPipeline are used. Needs a CUDA device.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmark import ACTION, CRITIC, OBS

PEER = "uni_rl"


def is_importable() -> bool:
    return importlib.util.find_spec(PEER) is not None


class Peer:
    """Its replay of one shape, with the four measurements of bench_ipc.py. Every call builds what it measures and takes it down."""

    def __init__(self, slot_rows: int, depth: int, batch_rows: int, seed: int) -> None:
        self.slot_rows = slot_rows
        self.depth = depth
        self.batch_rows = batch_rows
        self.seed = seed

    def serial_ms(self, capacity: int, ticks: int) -> list[float]:
        """Milliseconds of each tick: add, commit and gather one after the other."""
        import torch

        with self._open(capacity) as (memory, pipeline):
            rows, spent_ms = self._rows(), []
            for tick in range(ticks):
                start_s = time.perf_counter()
                memory.add_batch(**rows)
                pipeline.start_prepare(tick, self.batch_rows, min_snapshot_ptr=(tick + 1) * self.slot_rows)
                pipeline.sample_large_batch(tick, self.batch_rows)
                torch.cuda.synchronize()
                spent_ms.append((time.perf_counter() - start_s) * 1e3)
                pipeline.after_tick()
            return spent_ms

    def boundary_ms(self, capacity: int, ticks: int, steps: int, step: Callable[[], None]) -> list[float]:
        """Milliseconds of each boundary call after ``steps`` update steps, prefetched one tick ahead."""
        import torch.multiprocessing as multiprocessing

        context = multiprocessing.get_context("spawn")
        with self._open(capacity) as (memory, pipeline):
            go, other = context.Pipe()
            process = context.Process(target=_collect, args=(memory, other, self._rows()), daemon=True)
            process.start()
            spent_ms = []
            for tick in range(ticks + 1):
                pipeline.start_prepare(tick, self.batch_rows, min_snapshot_ptr=(tick + 1) * self.slot_rows)
                go.send(True)
                for _ in range(steps):
                    step()
                    pipeline.progress()
                if tick:
                    pipeline.after_tick()
                start_s = time.perf_counter()
                pipeline.sample_large_batch(tick, self.batch_rows)
                spent_ms.append((time.perf_counter() - start_s) * 1e3)
            go.send(False)
            process.join()
            return spent_ms[1:]  # the first tick waits for the collector's start

    def rows_per_s(self, capacity: int, duration_s: float) -> float:
        """Rows a second that one collector adds, the last copy included."""
        with self._open(capacity) as (memory, pipeline):
            rows, added, start_s = self._rows(), 0, time.perf_counter()
            while time.perf_counter() - start_s < duration_s:
                memory.add_batch(**rows)
                added += self.slot_rows
            pipeline.progress(wait=True)
            return added / (time.perf_counter() - start_s)

    def storage_bytes(self, capacity: int) -> tuple[int, int]:
        """Bytes on the host and on the device."""
        with self._open(capacity) as (_, pipeline):
            manifest = pipeline.transfer_manifest
            return int(manifest["host_storage_bytes"]), int(manifest["storage_bytes"])

    @contextmanager
    def _open(self, capacity: int) -> Iterator[tuple[Any, Any]]:
        from uni_rl.ipc.replay_buffer import ReplayBuffer  # type: ignore[import-not-found]
        from uni_rl.ipc.replay_pipelines.gpu_resident import GPUResidentReplayPipeline  # type: ignore[import-not-found]

        shape = {"ingress_slot_rows": self.slot_rows, "critic_dim": CRITIC, "ingress_depth": self.depth}
        memory = ReplayBuffer(capacity, OBS, ACTION, "cpu", **shape)
        pipeline = GPUResidentReplayPipeline(memory, device="cuda:0", sample_count=self.batch_rows, base_seed=self.seed)
        try:
            pipeline.warmup()
            yield memory, pipeline
        finally:
            pipeline.close()

    def _rows(self) -> dict[str, Any]:
        import torch

        generator, n = torch.Generator().manual_seed(self.seed), self.slot_rows
        widths = {"obs": OBS, "actions": ACTION, "next_obs": OBS, "critic": CRITIC, "next_critic": CRITIC}
        rows = {name: torch.randn(n, width, generator=generator) for name, width in widths.items()}
        return rows | {"rewards": torch.randn(n, generator=generator), "dones": torch.zeros(n), "truncated": torch.zeros(n)}


def _collect(memory: Any, go: Connection, rows: dict[str, Any]) -> None:
    while go.recv():
        memory.add_batch(**rows)
