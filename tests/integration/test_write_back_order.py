"""What is written about a batch is in every batch drawn under a later lease, however many gathers are under way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from replay_server_client import Collector, Field, Learner, Schema
from support.rarely import rarely
from support.servers import ServerProcess

SCHEMA = Schema.of(mark="int64", note=Field("float32", mutable=True))
BATCHES = 300


@pytest.mark.parametrize("prefetch", [3, *rarely(0, 1)])
def test_each_batch_sees_the_newest_write_whose_lease_came_before_its_own(server: ServerProcess, prefetch: int) -> None:
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
        collector.write({"mark": np.zeros(1, np.int64), "note": np.zeros(1, np.float32)})
        collector.flush()
    period = prefetch + 1
    with Learner.connect(server.name, device="cpu", prefetch=prefetch, run_dir=server.run_dir) as learner:
        for number in range(1, BATCHES + 1):
            batch = learner.sample(4)
            assert batch["note"].tolist() == [max(0, number - period)] * 4
            learner.update(batch, {"note": torch.full((4,), float(number))})
