"""Throughput, error and recovery of a simulation, drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8.4))
    shards = [row["shards"] for row in result["sampling"]]
    axes[0, 0].loglog(shards, [row["rows_per_s"] for row in result["sampling"]], "o-", label="batches of 4,096")
    axes[0, 0].set(xlabel="shards (10^10 rows together)", ylabel="rows / s", title="Throughput: a learner's rows")
    for window in (1, 4, 16):
        runs = [run for run in result["ingest_by_latency"] if run["window"] == window and run["chunk_bytes"] == 1 << 20]
        axes[0, 1].semilogx(
            [run["latency_s"] * 1e3 for run in runs], [run["mib_per_s"] for run in runs], "o-", label=f"{window} on their way"
        )
    axes[0, 1].set(xlabel="ms each way", ylabel="MiB / s", title="Throughput: one forwarder into a shard, chunks of 1 MiB", ylim=(0, None))
    for key, label in (("drawn_error", "drawn, full rings"), ("chance", "chance alone")):
        axes[0, 2].loglog(shards, [row[key] for row in result["sampling"]], "o-" if key == "drawn_error" else "--", label=label)
    filling = [run["shards"] for run in result["filling"]]
    axes[0, 2].loglog(filling, [run["error_bound"] for run in result["filling"]], "s-", label="bound while filling")
    axes[0, 2].set(xlabel="shards", ylabel="total variation", title="Sampling error: distance from uniform over the union")
    for key, label in (("ingest_killed", "host killed after 2 and 5 s"), ("ingest_stalled", "sidecar commits nothing from 3 to 7 s")):
        times, rates = zip(*result[key]["bytes_per_s_over_time"], strict=True)
        axes[1, 0].plot(times, [rate / 2**20 for rate in rates], label=label)
    axes[1, 0].set(xlabel="s", ylabel="MiB / s", title="Recovery: into a shard")
    for run in result["losing"]:
        if run["shards"] in (8, 64, 512):
            times, rates = zip(*run["rows_per_s_over_time"], strict=True)
            axes[1, 1].loglog(times, rates, ".-", label=f"{run['shards']} shards")
    axes[1, 1].set(xlabel="s", ylabel="rows / s", title="Recovery: a learner, a tenth of the shards lost half-way")
    lost = [run["shards"] for run in result["losing"]]
    axes[1, 2].semilogx(lost, [run["slowest_batch_s"] for run in result["losing"]], "o-", label="the batch that met the loss")
    axes[1, 2].semilogx(lost, [run["ms_per_batch"] / 1e3 for run in result["losing"]], "--", label="the others")
    axes[1, 2].set(xlabel="shards, a tenth of them lost at once", ylabel="s", title="Recovery: what the loss costs a learner")
    axes[1, 0].set_ylim(0, 220)
    for axis in axes.flat:
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
