"""Rows whose every field is derived from their seq: a torn, stale or misplaced row shows by itself, at full ingest rate and on any device.

Element j of row seq holds ``seq * factor(j) + j``; a row is the concatenation of three fields. Only one collector may write, in slots, so
that it knows each row's seq. The checks run where the batch lies and cost a few passes over it; nothing is read back until the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypedDict

import numpy as np
import numpy.typing as npt
from replay_server_client import Collector, Schema

TIMEOUT_S = 20.0


class Sampled(TypedDict):
    """What one learner found; ``newest`` is the largest ``committed`` of its windows. ``torn`` and ``stale`` must be 0."""

    rows: int
    torn: int
    stale: int
    newest: int
    dropped: int


def schema_of(width: int) -> Schema:
    """``width`` int64 elements a row, at least 3: the first and the last lie apart, so that a copy broken off in between shows."""
    return Schema.of(first="int64", wide=("int64", width - 2), last="int64")


def factors(width: int) -> npt.NDArray[np.int64]:
    return 2 * np.arange(width, dtype=np.int64) + 1


def write_for(collector: Collector, width: int, first_seq: int, seconds: float) -> int:
    """As ``write_until``, for so long."""
    end = time.monotonic() + seconds
    return write_until(collector, width, first_seq, lambda seq: time.monotonic() >= end)


def write_until(collector: Collector, width: int, first_seq: int, is_enough: Callable[[int], bool]) -> int:
    """Fills slot after slot in place, as fast as credits come, until ``is_enough(seq)``; returns the next row's seq."""
    factor, seq = factors(width), first_seq
    steps: npt.NDArray[np.int64] | None = None
    while not is_enough(seq):
        with collector.slot(timeout=TIMEOUT_S) as slot:
            n = slot.max_rows
            if steps is None:
                steps = np.arange(n, dtype=np.int64)[:, None] * factor + np.arange(width)
            base = seq * factor
            np.add(steps[:, 0], base[0], out=slot["first"])
            np.add(steps[:, 1:-1], base[1:-1], out=slot["wide"])
            np.add(steps[:, -1], base[-1], out=slot["last"])
            slot.rows = n
        seq += n
    return seq


def sample_until_closed(server_name: str, run_dir: str, device: str, width: int, batch_rows: int, prefetch: int) -> Sampled:
    """Samples until the server stops in good order. For ``Children.run``; says "sampling" once it does."""
    import torch
    from replay_server_client import Learner
    from support.self_verifying import TIMEOUT_S, factors

    with Learner.connect(server_name, device=device, name=f"l{prefetch}", prefetch=prefetch, run_dir=run_dir, timeout=TIMEOUT_S) as learner:
        place = learner.sample(batch_rows, timeout=TIMEOUT_S).seqs.device
        print("sampling", flush=True)
        factor, offset = torch.from_numpy(factors(width)).to(place), torch.arange(width, device=place)
        torn, stale = (torch.zeros((), dtype=torch.int64, device=place) for _ in range(2))
        rows = newest = 0
        for batch in learner.batches(batch_rows, timeout=TIMEOUT_S):
            tail, committed = batch.window
            torn += (batch.span("first", "wide", "last") != batch.seqs[:, None] * factor + offset).any(1).sum()
            stale += ((batch["first"] < tail) | (batch["first"] >= committed)).sum()
            rows, newest = rows + batch_rows, max(newest, committed)
        found = learner.statistics()
        return {"rows": rows, "torn": int(torn), "stale": int(stale), "newest": newest, "dropped": found.dropped}
