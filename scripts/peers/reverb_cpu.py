"""The other side of bench_cpu.py: DeepMind Reverb, by an interpreter that has it (Python 3.11, dm-reverb[tensorflow]==0.14.0).

Takes one JSON object as its argument (row_floats, capacity, flush_rows, batch_rows, insert_s, sample_s, seed), prints one.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import reverb  # type: ignore[import-not-found]
import tensorflow as tf  # type: ignore[import-not-found]

TABLE = "rows"


def insert(address: str, row: Any, flush_rows: int, duration_s: float) -> float:
    """Rows a second of one writer: every row an item of its own, at most ``flush_rows`` of them unconfirmed."""
    rows, start_s = 0, time.perf_counter()
    with reverb.Client(address).trajectory_writer(num_keep_alive_refs=1) as writer:
        while time.perf_counter() - start_s < duration_s:
            for _ in range(flush_rows):
                writer.append({"row": row})
                writer.create_item(TABLE, priority=1.0, trajectory={"row": writer.history["row"][-1:]})
            writer.flush()
            rows += flush_rows
    return rows / (time.perf_counter() - start_s)


def sample(address: str, row_floats: int, batch_rows: int, duration_s: float) -> float:
    """Rows a second of one dataset that reads batches; its first batch, which starts its workers, does not count."""
    shapes = {"row": tf.TensorShape([1, row_floats])}
    dataset = reverb.TrajectoryDataset(
        address, TABLE, dtypes={"row": tf.float32}, shapes=shapes, max_in_flight_samples_per_worker=2 * batch_rows
    )
    batches = iter(dataset.batch(batch_rows))
    next(batches)
    rows, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < duration_s:
        next(batches)
        rows += batch_rows
    return rows / (time.perf_counter() - start_s)


def main() -> None:
    shape = json.loads(sys.argv[1])
    table = reverb.Table(TABLE, reverb.selectors.Uniform(), reverb.selectors.Fifo(), shape["capacity"], reverb.rate_limiters.MinSize(1))
    server = reverb.Server(tables=[table], port=None)
    address = f"localhost:{server.port}"
    row = np.random.default_rng(shape["seed"]).standard_normal(shape["row_floats"], dtype=np.float32)
    print(
        json.dumps(
            {
                "insert_rows_per_s": insert(address, row, shape["flush_rows"], shape["insert_s"]),
                "sample_rows_per_s": sample(address, shape["row_floats"], shape["batch_rows"], shape["sample_s"]),
                "versions": {name: importlib.metadata.version(name) for name in ("dm-reverb", "tensorflow", "numpy")},
            }
        )
    )


if __name__ == "__main__":
    main()
