"""A learner of several nodes whose rings and batches lie on GPUs, with no Ray between: uniform, by priority, in steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from replay_server_client.ray.learner import ClusterLearner
from replay_server_client.ray.shard_host import LocalHost
from support.markers import is_whole
from support.servers import ServerProcess
from support.shards import Seen, fill

pytestmark = [pytest.mark.gpu]
SIZES = {"g0": 200, "g1": 500}


def test_rows_of_a_ring_on_a_gpu_and_of_one_in_host_memory_are_uniform_in_a_batch_on_the_gpu(
    start_server: Callable[..., ServerProcess],
) -> None:
    options = ("--capacity", "2000", "--slot-rows", "16", "--columns", "link,priority")
    hosts = {}
    for shard, (name, device) in enumerate({"g0": "cuda", "g1": "cpu"}.items()):
        server = start_server("--device", device, *options, name=name)
        fill(server, shard, 0, SIZES[name])
        hosts[name] = LocalHost(server.name, str(server.run_dir))
    with ClusterLearner(hosts, device="cuda", seed=1) as learner:
        seen = Seen(shards=2)
        for _ in range(100):
            batch = learner.sample(1000)
            assert batch["step"].is_cuda
            assert is_whole({name: values.cpu() for name, values in batch.fields.items()}).all()
            seen.add(batch)
        assert seen.is_uniform, seen.chi_square
        for _ in range(20):
            batch = learner.sample(1000, by="priority", alpha=1.0, beta=1.0, timeout=30)
            is_likely = (batch["collector"] == 0) & (batch["step"] < 100)
            learner.update_priorities(batch, torch.where(is_likely, 1.0, 0.001))
        likely = is_likely.cpu().numpy()
        assert likely.mean() > 0.9
        np.testing.assert_allclose(batch.weights.cpu().numpy()[likely], 0.001, rtol=1e-4)
        assert learner.stale_updates(10) == 0
