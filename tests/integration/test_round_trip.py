"""What goes in comes out: tensors, nested mappings, final observations, and rows that are not finite by their policy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from replay_server_client import Collector, Field, Learner, Schema
from support.servers import ServerProcess


def test_tensors_and_nested_mappings_go_in_as_arrays_do(server: ServerProcess) -> None:
    schema = Schema.of({"obs": {"pos": ("float32", 3), "code": "bfloat16"}, "reward": Field("float32", cast=True)})
    pos, code = torch.randn(4, 3), torch.randn(4).to(torch.bfloat16)
    with (
        Collector.connect(server.name, schema=schema, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=0) as learner,
    ):
        collector.write({"obs": {"pos": pos, "code": code}, "reward": np.array([1.0, 2.0, 3.0, 0.1])})
        batch = learner.sample(64, min_committed=collector.flush())
        assert torch.equal(batch["obs.pos"], pos[batch.seqs])
        assert torch.equal(batch["obs.code"], code[batch.seqs])
        assert torch.equal(batch["reward"], torch.tensor([1.0, 2.0, 3.0, 0.1])[batch.seqs])


@pytest.mark.parametrize("nonfinite", ["reject", "count", "allow"])
def test_rows_that_are_not_finite_follow_the_policy(start_server: Callable[..., ServerProcess], nonfinite: str) -> None:
    server = start_server("--capacity", "100", "--slot-rows", "16", "--nonfinite", nonfinite)
    schema = Schema.of(mark="int64", reward="float32")
    reward = np.ones(10, np.float32)
    reward[[2, 5, 6]] = [np.nan, np.inf, -np.inf]
    with (
        Collector.connect(server.name, schema=schema, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=0) as learner,
    ):
        collector.write({"mark": np.arange(10), "reward": reward})
        seq = collector.flush()
        batch = learner.sample(100, min_committed=seq)
        kept = set(range(10)) - ({2, 5, 6} if nonfinite == "reject" else set())
        assert set(batch["mark"].tolist()) == kept
        found = collector.statistics()
        assert (seq, found.rows_rejected, found.rows_nonfinite) == {
            "reject": (7, 3, 0),
            "count": (10, 0, 3),
            "allow": (10, 0, 0),
        }[nonfinite]
        assert learner.moments("reward")["count"] == 7


def test_a_final_observation_stands_only_in_the_rows_of_its_mask(server: ServerProcess) -> None:
    schema = Schema.of(mark="int64", next_obs="int64")
    with (
        Collector.connect(server.name, schema=schema, lanes=4, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=0) as learner,
    ):
        for step in range(12):  # every slot is used again, with and without endings
            mark = np.arange(4) + 4 * step
            ends = np.arange(4) == 3 if step % 2 == 0 else None
            final = {"next_obs": -mark} if ends is not None else None
            collector.write({"mark": mark, "next_obs": mark + 1}, final_mask=ends, final=final)
            seq = collector.flush()
        batch = learner.sample(500, min_committed=seq)
        for mark, following in zip(batch["mark"].tolist(), batch["next_obs"].tolist(), strict=True):
            is_end = mark % 4 == 3 and mark // 4 % 2 == 0
            assert following == (-mark if is_end else mark + 1)
