"""What calls, links, hosts and losses cost: assumed, or fitted to what scripts/bench_ray.py measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

INLINE_BYTES = 100_000


@dataclass(frozen=True)
class Costs:
    call_s: float = 0.0008
    copy_bandwidth: float = 2.0e9
    latency_s: float = 0.0001
    bandwidth: float = 12.5e9 * 0.8
    serve_s: float = 0.0004
    commit_bandwidth: float = 1.0e9
    restart_s: float = 1.7
    notice_s: float = 1.8
    row_s: float = 5e-7
    inline_call_s: float = 0.0006
    inline_serve_s: float = 0.0004
    deliver_wait_s: float = 2.0

    def of_call(self, n_bytes: int) -> tuple[float, float]:
        """What a chunk of this size costs sender and host, its bytes' time left out."""
        return (self.inline_call_s, self.inline_serve_s) if n_bytes <= INLINE_BYTES else (self.call_s, self.serve_s)

    @classmethod
    def fitted(cls, measured: dict[str, Any]) -> Costs:
        """Seconds a call = a + bytes / b, through the larger chunks. With four on their way the slower side is what all wait for, taken to
        be the host; what a lone chunk takes beyond it is the sender's. A loopback has no bandwidth of its own. ``row_s``: what a row
        adds to a batch of one shard.
        """

        def line(window: int) -> tuple[float, float, float]:
            """(a of large chunks, 1 / b, a of inline ones)."""
            runs = sorted((run for run in measured["carried"] if run["window"] == window), key=lambda run: run["chunk_bytes"])
            size = [run["mib_per_s"] * 2**20 / run["calls_per_s"] for run in runs]
            took = [1 / run["calls_per_s"] for run in runs]
            per_byte = max(1e-11, (took[-1] - took[-2]) / (size[-1] - size[-2]))
            return max(1e-5, took[-1] - per_byte * size[-1]), per_byte, max(1e-5, took[0] - per_byte * size[0])

        (alone_s, alone_per_byte, alone_inline_s), (host_s, host_per_byte, host_inline_s) = line(1), line(4)
        lone = {run["n"]: run["ms_per_batch"] / 1e3 for run in measured["batches"] if run["shards"] == 1 and not run["prefetch"]}
        small, large = min(lone), max(lone)
        return cls(
            call_s=max(1e-5, alone_s - host_s),
            copy_bandwidth=1 / max(1e-11, alone_per_byte - host_per_byte),
            latency_s=2e-5,
            bandwidth=1e12,
            serve_s=host_s,
            commit_bandwidth=1 / host_per_byte,
            row_s=max(1e-8, (lone[large] - lone[small]) / (large - small)),
            inline_call_s=max(1e-5, alone_inline_s - host_inline_s),
            inline_serve_s=host_inline_s,
            restart_s=float(np.median(measured["host_recovery_s"])),
        )
