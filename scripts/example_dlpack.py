"""Batches of the server in JAX, CuPy or numpy: fields by DLPack, and what keeps the next gather behind their reading.

python scripts/example_dlpack.py [--library jax|cupy|numpy] [--device cpu|cuda]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping

import numpy as np
import torch
from replay_server_client import Collector, Learner, Schema
from replay_server_client.adapters import dlpack_fields, wait_for_stream
from torch import Tensor

from replay_server import ReplayServer

SCHEMA = Schema.of(obs=("float32", 8), reward="float32")
ROWS, BATCH_ROWS, BATCHES = 4_000, 256, 50

Step = Callable[[Mapping[str, Tensor]], float]
"""Reads ``obs`` and ``reward`` of a batch and returns a number of it; when it returns, the next ``sample()`` may come."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", dest="reader", choices=STEPS, default="numpy", help="who reads the batches (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where they are (default: %(default)s)")
    options = parser.parse_args()
    step = STEPS[options.reader]()
    with (
        ReplayServer.spawn(capacity=10_000, device=options.device),
        Collector.connect(schema=SCHEMA) as collector,
        Learner.connect(device=options.device, seed=0) as learner,
    ):
        obs = np.random.default_rng(0).standard_normal((ROWS, 8), np.float32)
        collector.write({"obs": obs, "reward": obs.sum(1)})
        rows = collector.flush()
        errors = []
        for _ in range(BATCHES):
            batch = learner.sample(BATCH_ROWS, min_committed=rows)
            errors.append(step(dlpack_fields(batch, "obs", "reward")))
    print(f"{options.reader} on {options.device}: {BATCHES} batches; sum of obs and reward differ by {max(errors):.1e} at most")
    return 0 if max(errors) < 1e-3 else 1


def by_numpy() -> Step:
    def step(fields: Mapping[str, Tensor]) -> float:
        obs, reward = (np.from_dlpack(tensor) for tensor in fields.values())
        return float(np.abs(obs.sum(1) - reward).max())

    return step


def by_jax() -> Step:
    import jax

    difference = jax.jit(lambda obs, reward: abs(obs.sum(1) - reward).max())

    def step(fields: Mapping[str, Tensor]) -> float:
        obs, reward = (jax.dlpack.from_dlpack(tensor) for tensor in fields.values())
        return float(jax.block_until_ready(difference(obs, reward)))

    return step


def by_cupy() -> Step:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)

    def step(fields: Mapping[str, Tensor]) -> float:
        with stream:
            obs, reward = (cupy.from_dlpack(tensor) for tensor in fields.values())
            difference = abs(obs.sum(1) - reward).max()
        wait_for_stream(stream.ptr, torch.cuda.current_device())
        return float(difference.get(stream=stream))

    return step


STEPS: dict[str, Callable[[], Step]] = {"numpy": by_numpy, "jax": by_jax, "cupy": by_cupy}

if __name__ == "__main__":
    sys.exit(main())
