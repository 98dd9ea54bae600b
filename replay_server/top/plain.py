"""A view as one line of text, for output that is no terminal: a log file, a pipe. Needs no rich."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replay_server.top.watch import View
from replay_server.units import human_bytes, human_seconds


def line(view: View, clock: str) -> str:
    """Fill, rates, latency, flow and clients; or what is missing."""
    report = view.report
    if view.missing is not None or report is None:
        return f"{clock} {view.missing}"
    ring, rates, latency, flow = report["ring"], report["rates"], report["latency"], report["flow"]
    parts = [report["name"], f"generation {report['generation']}", report["phase"]]
    if ring is not None:
        parts.append(f"{100 * ring['size_rows'] / ring['capacity_rows']:.1f} % of {ring['capacity_rows']:,} rows")
        parts.append(f"window [{ring['tail']:,}, {ring['committed']:,})")
    parts.append(f"{rates['rows_per_s']:,.0f} rows/s {human_bytes(rates['bytes_per_s'])}/s {rates['batches_per_s']:,.1f} batches/s")
    parts.append(f"commit {percentiles(latency['commit_us'])} grant {percentiles(latency['grant_us'])}")
    parts.append(f"{len(report['collectors'])} collectors {len(report['learners'])} learners")
    parts.append(blocked(flow) if flow["blocked_side"] else flow["state"])
    return f"{clock} {', '.join(parts)}"


def blocked(flow: Mapping[str, Any]) -> str:
    """Which side waits, since when and on what."""
    return f"{flow['blocked_side']} blocked for {human_seconds(flow['since_s'])} ({flow['state']}): {flow['reason']}"


def percentiles(found: Mapping[str, float | None]) -> str:
    """Median and 99th percentile: ``120 µs/4.8 ms``."""
    if found["p50"] is None or found["p99"] is None:
        return "-"
    return f"{human_seconds(found['p50'] * 1e-6)}/{human_seconds(found['p99'] * 1e-6)}"
