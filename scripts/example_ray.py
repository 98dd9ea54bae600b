#!/usr/bin/env python3
"""Two rings on two nodes, a collector on a third, one learner: on one machine, with Ray. Needs the extra ``ray``.

On real nodes the servers are services, and each ``start_…`` call is made on its node: docs/several_nodes.md.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # all on loopback
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
from ray.cluster_utils import Cluster
from replay_server_client import Collector
from replay_server_client.ray import connect_learner, start_forwarder, start_host
from replay_server_protocol.schema import Schema

from replay_server.spawn import ReplayServer

SCHEMA = Schema.of({"obs": ("float32", (8,)), "step": ("int64", ())})
STEPS, LANES = 2_000, 4


def collect(server: str, run_dir: str, first: int) -> None:
    """What a collector does on one machine, unchanged."""
    rng = np.random.default_rng(first)
    with Collector.connect(server, run_dir=run_dir, schema=SCHEMA, lanes=LANES, timeout=30) as collector:
        for step in range(first, first + STEPS):
            collector.write({"obs": rng.standard_normal((LANES, 8), np.float32), "step": np.full(LANES, step)})
        print(f"collector at {server!r}: {STEPS * LANES:,} rows committed, the last before seq {collector.flush(30):,}")


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False})
    servers: list[ReplayServer] = []
    run_dir = tempfile.mkdtemp(prefix="rs-", dir="/tmp")
    try:
        nodes = {name: cluster.add_node(num_cpus=1, object_store_memory=80 << 20).node_id for name in ("g1", "g2", "c1")}
        ray.init(address=cluster.address, namespace="replay", log_to_driver=False)
        for shard in ("g1", "g2"):
            servers.append(ReplayServer.spawn(name=shard, run_dir=run_dir, capacity=20_000, device="cpu"))
            start_host(shard, server=shard, run_dir=run_dir, node_id=nodes[shard])
        start_forwarder("g1", name="train-1", run_dir=run_dir, node_id=nodes["c1"])
        start_forwarder("g2", name="train-2", run_dir=run_dir, node_id=nodes["c1"])

        spawned = multiprocessing.get_context("spawn")
        collectors = [spawned.Process(target=collect, args=(f"train-{i}", run_dir, i * STEPS)) for i in (1, 2)]
        for process in collectors:
            process.start()
        for process in collectors:
            process.join()

        with connect_learner(["g1", "g2"], local={"g1": ("g1", run_dir)}, min_size=1000) as learner:
            for _ in range(5):
                batch = learner.sample(256)
                print(
                    f"epoch {batch.epoch}: {batch.counts.rows} rows of {batch.sizes}, steps {batch['step'].min()} to {batch['step'].max()}"
                )
    finally:
        ray.shutdown()
        cluster.shutdown()
        for server in servers:
            server.close()
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
