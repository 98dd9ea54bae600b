#!/usr/bin/env python3
"""What two Ray nodes on this machine do: rows carried to a host at several chunk sizes and windows, and through a forwarder; batches a
second; recovery of a host.

One core or two for everything, loopback, no GPU: it says how the parts stand to each other, and feeds scripts/simulate_scale.py. Of
three runs of a setting the one that the rest of the machine disturbed least is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0")

import numpy as np
import ray
from ray.cluster_utils import Cluster
from replay_server_client import Collector, ReplayError
from replay_server_client.ray.actors import RemoteHost
from replay_server_client.ray.carrier import ChunkCarrier
from replay_server_client.ray.cluster import connect_learner, start_forwarder, start_host
from replay_server_client.ray.delivery import Delivery
from replay_server_protocol.messages import Publish
from replay_server_protocol.passing import Passed
from replay_server_protocol.schema import Schema

from replay_server.spawn import ReplayServer

ROW_BYTES, SLOT_ROWS = 256, 256
SCHEMA = Schema.of({"frame": ("uint8", (ROW_BYTES,))})
SHARDS = ["a", "b"]
SERVER: dict[str, Any] = {
    "capacity": 100_000,
    "slot_rows": SLOT_ROWS,
    "depth": 32,
    "device": "cpu",
    "headroom": 100_000,
    "columns": ("link", "priority"),
}
CHUNKS_AND_WINDOWS = [(1 << 16, 1), (1 << 16, 4), (1 << 20, 1), (1 << 20, 2), (1 << 20, 4), (1 << 22, 1), (1 << 22, 2), (1 << 22, 4)]

Run = dict[str, Any]


def carried(shard: str, chunk_bytes: int, window: int, total_bytes: int, origin: str) -> Run:
    """Bytes a second from a node's memory until committed in the other's ring, and calls a second."""
    carrier = ChunkCarrier(RemoteHost(shard), Delivery(window_chunks=window, chunk_bytes=chunk_bytes))
    carrier.agree(SCHEMA)
    carrier.start()
    rows = np.zeros(ROW_BYTES * SLOT_ROWS, np.uint8)
    publishes = total_bytes // len(rows)
    ahead = 2 * window * max(1, chunk_bytes // len(rows))
    began, done, offered = time.perf_counter(), 0, 0
    while done < publishes:
        while offered < publishes and offered - done < ahead:
            offered += 1
            carrier.carry(Passed(origin, offered, origin, 1, True, Publish(1, 1, offered, 0, SLOT_ROWS, 0, 0, 0, b"", []), rows))
        for committed in carrier.take_committed():
            done = committed.number
        time.sleep(0.0002)
    took_s, counts = time.perf_counter() - began, carrier.counts()
    carrier.close()
    return {
        "chunk_bytes": chunk_bytes,
        "window": window,
        "mib_per_s": publishes * len(rows) / took_s / 2**20,
        "calls_per_s": counts.chunks / took_s,
        "failures": counts.failures,
    }


def collected(server: ReplayServer, node: str, total_bytes: int) -> Run:
    """Bytes a second that one collector's ``write`` brings through a forwarder as it is by default, and how large the chunks became."""
    forwarder = start_forwarder("a", name="forwarder", run_dir=server.run_dir, node_id=node)
    rows = {"frame": np.zeros((SLOT_ROWS, ROW_BYTES), np.uint8)}
    with Collector.connect("forwarder", run_dir=server.run_dir, schema=SCHEMA, timeout=60) as collector:
        collector.write(rows)
        collector.flush(60)
        before = ray.get(forwarder.report.remote())["shards"]["a"]
        began = time.perf_counter()
        for _ in range(total_bytes // (SLOT_ROWS * ROW_BYTES)):
            collector.write(rows, timeout=60)
        collector.flush(60)
        took_s, depth = time.perf_counter() - began, collector.statistics().depth
    after = ray.get(forwarder.report.remote())["shards"]["a"]
    ray.get(forwarder.stop.remote())
    ray.kill(forwarder)
    chunks, n_bytes = after["chunks"] - before["chunks"], after["bytes"] - before["bytes"]
    return {"slots": depth, "mib_per_s": n_bytes / took_s / 2**20, "chunks": chunks, "bytes_per_chunk": n_bytes / chunks}


def batches(shards: list[str], n: int, prefetch: bool, count: int, by: str = "uniform") -> Run:
    with connect_learner(shards, prefetch=prefetch) as learner:
        learner.wait_ready(30)
        learner.sample(n, by=by, timeout=30)
        began = time.perf_counter()
        for _ in range(count):
            learner.sample(n, by=by, timeout=30)
        took_s = (time.perf_counter() - began) / count
        return {"shards": len(shards), "n": n, "by": by, "prefetch": prefetch, "ms_per_batch": took_s * 1e3}


def recovery_s(shard: str, kills: int) -> list[float]:
    """From kill -9 of a host to its next answer."""
    took = []
    host = ray.get_actor(f"replay-host:{shard}", namespace="replay")
    for _ in range(kills):
        os.kill(ray.get(host.report.remote())["pid"], 9)
        began = time.perf_counter()
        while True:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(host.report.remote(), timeout=30)
                break
            time.sleep(0.01)
        took.append(time.perf_counter() - began)
    return took


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[list[ReplayServer], list[str]]]:
    """Servers of the shards ``SHARDS``, each with its host on a node of its own, and the nodes."""
    started: list[ReplayServer] = []
    head = {"num_cpus": 1, "object_store_memory": 200 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=200 << 20).node_id for _ in SHARDS]
        ray.init(address=cluster.address, namespace="replay", log_to_driver=False)
        for shard, node in zip(SHARDS, nodes, strict=True):
            run_dir = tempfile.mkdtemp(prefix="rs-", dir="/tmp")
            started.append(ReplayServer.spawn(name=shard, run_dir=run_dir, **SERVER))
            start_host(shard, server=shard, run_dir=run_dir, node_id=node)
        yield started, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()
        for server in started:
            server.close()
            shutil.rmtree(server.run_dir, ignore_errors=True)


def told(run: Run) -> Run:
    print(run, flush=True)
    return run


def least_disturbed(measure: Callable[[int], Run]) -> Run:
    """Of three runs the one with most bytes a second, or the shortest batches."""
    return told(max((measure(again) for again in range(3)), key=lambda run: run.get("mib_per_s", -run.get("ms_per_batch", 0.0))))


def measured(servers: list[ReplayServer], nodes: list[str], total_bytes: int) -> Run:
    result: Run = {
        "carried": [
            least_disturbed(lambda again, i=i, chunk=chunk, window=window: carried("a", chunk, window, total_bytes, f"bench{i}-{again}"))
            for i, (chunk, window) in enumerate(CHUNKS_AND_WINDOWS)
        ]
    }
    with contextlib.suppress(ReplayError), Collector.connect("b", run_dir=servers[1].run_dir, schema=SCHEMA) as collector:
        collector.write({"frame": np.zeros((50_000, ROW_BYTES), np.uint8)}, timeout=30)
    result["collected"] = least_disturbed(lambda _: collected(servers[0], nodes[1], total_bytes))
    result["batches"] = [
        least_disturbed(lambda _, names=names, n=n, prefetch=prefetch: batches(names, n, prefetch, 40))
        for names in (["a"], SHARDS) for n in (256, 4096) for prefetch in (False, True)
    ]  # fmt: skip
    result["by_priority"] = least_disturbed(lambda _: batches(SHARDS, 256, True, 40, "priority"))
    result["row_bytes"] = ROW_BYTES
    result["host_recovery_s"] = recovery_s("a", 5)
    print(result["host_recovery_s"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=128, help="carried for each setting")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()  # noqa: S607
    when = time.strftime("%Y-%m-%d", time.gmtime())
    place: Run = {"commit": commit, "date": when, "machine": platform.platform(), "cpus": os.cpu_count(), "ray": ray.__version__}
    with two_nodes() as (servers, nodes):
        result = {**place, **measured(servers, nodes, options.mib << 20)}
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
