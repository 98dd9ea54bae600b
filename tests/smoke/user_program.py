"""A user's program, for a type checker that knows the installed wheel alone: what it says of the public names must be whole and right."""

from __future__ import annotations

from typing import assert_type

import numpy as np
from replay_server_client import Batch, Collector, Learner, ReplayTimeout, Schema, Trace
from torch import Tensor

from replay_server import ReplayServer


def collect(server: str, schema: Schema) -> int:
    with Collector.connect(server, schema=schema, lanes=2, name="walker", timeout=5.0, trace=Trace("walker")) as collector:
        assert_type(collector, Collector)
        rows = {"obs": np.zeros((2, 3), np.float32), "reward": np.zeros(2, np.float32)}
        try:
            collector.write(rows, mask=np.ones(2, np.bool_))
        except ReplayTimeout as late:
            assert_type(late.rows_written, int)
        with collector.span("evaluation", episode=1):
            collector.cut([0, 1])
        with collector.slot() as slot:
            slot.rows = 0
        latest = collector.latest("policy")
        if latest is not None:
            assert_type(latest[0], int)
        seq = collector.flush(timeout=5.0)
        assert_type(seq, int)
        return seq


def learn(server: str, seq: int) -> float:
    with Learner.connect(server, device="cpu", seed=1, prefetch=1) as learner:
        batch = learner.sample(32, min_committed=seq, n_step=3, timeout=5.0)
        assert_type(batch, Batch)
        assert_type(batch["obs"], Tensor)
        assert_type(batch.seqs, Tensor)
        with learner.span("update", tick=1):
            loss = float(batch["reward"].mean())
        learner.update_priorities(batch, batch["reward"].abs())
        assert_type(learner.post("policy", {"w": np.zeros(3)}), int)
        return loss


def main() -> None:
    schema = Schema.of({"obs": ("float32", 3), "reward": "float32"})
    with ReplayServer.spawn(capacity="1000", device="cpu") as server:
        learn(server.name, collect(server.name, schema))
        assert_type(server.name, str)
