"""A cluster's status for people: a line for each node, host and forwarder."""

from __future__ import annotations

from typing import Any


def cluster_lines(found: dict[str, Any]) -> list[str]:
    """``found`` is what replay_server_client.ray.status returns."""
    alive = sum(bool(node["alive"]) for node in found["nodes"])
    lines = [f"cluster  {alive} nodes alive, {len(found['nodes']) - alive} lost"]
    lines += [f"shard    {name}: {_host(report)}" for name, report in found["hosts"].items()] or ["shard    none: start_host(...)"]
    for name, report in found["forwarders"].items():
        lines += [f"forward  {name}: {told}" for told in _forwarder(report)]
    return lines


def _host(report: dict[str, Any]) -> str:
    sidecar = report.get("sidecar")
    if not sidecar:
        return f"{report['state']}: {report['error']}"
    ring = sidecar["ring"]
    size = f"{ring['size_rows']:,} of {ring['capacity_rows']:,} rows" if ring else "no ring yet"
    collectors, learners = len(sidecar["collectors"]), len(sidecar["learners"])
    return f"up, server {sidecar['name']!r} generation {sidecar['generation']}, {size}, {collectors} collectors, {learners} learners"


def _forwarder(report: dict[str, Any]) -> list[str]:
    """One for each shard that it sends to."""
    if "collectors" not in report:
        return [f"{report['state']}: {report['error']}"]
    return [f"{report['collectors']} collectors, {_carried(shard, counts)}" for shard, counts in report["shards"].items()]


def _carried(shard: str, counts: dict[str, Any]) -> str:
    waiting = f", {counts['unanswered']} publishes on their way" if counts["unanswered"] else ""
    error = f"; last error: {counts['last_error']}" if counts["last_error"] else ""
    carried = f"{counts['bytes'] / 2**20:,.0f} MiB in {counts['chunks']:,} chunks to shard {shard!r}"
    return f"{carried}, {counts['parts_sent_again']} publishes sent again{waiting}{error}"
