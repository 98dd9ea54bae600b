"""The status report as lines of text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replay_server.units import counted, human_bytes, human_seconds


def status_lines(report: Mapping[str, Any]) -> list[str]:
    """A few lines: what it is, the ring, the rates, who waits on what, every client."""
    device, ring, counters = report["device"], report["ring"], report["counters"]
    where = device["name"] or device["kind"]
    who = f"{report['name']}  pid {report['pid']}  generation {report['generation']}"
    lines = [f"{who}  {report['phase']}  {where}  up {report['uptime_s']:.0f} s"]
    if ring is not None:
        fill = 100 * ring["size_rows"] / ring["capacity_rows"]
        memory = human_bytes(ring["device_bytes"] or ring["host_bytes"])
        lines.append(
            f"ring       {ring['size_rows']:,} of {ring['capacity_rows']:,} rows ({fill:.1f} %), "
            f"window [{ring['tail']:,}, {ring['committed']:,}), {memory}"
        )
    ingress, rates, latency = report["ingress"], report["rates"], report["latency"]
    lines.append(
        f"ingress    {ingress['segments']} segments, {human_bytes(ingress['host_bytes'])}, {ingress['occupied_slots']} slots occupied; "
        f"{rates['rows_per_s']:,.0f} rows/s, {human_bytes(rates['bytes_per_s'])}/s, {rates['batches_per_s']:,.1f} batches/s"
    )
    lines.append(f"latency    commit {_percentiles(latency['commit_us'])}, grant {_percentiles(latency['grant_us'])}")
    flow = report["flow"]
    since = f" for {human_seconds(flow['since_s'])}" if flow["blocked_side"] else ""
    lines.append(f"flow       {flow['state']}{since}" + (f": {flow['reason']}" if flow["reason"] else "") + _minute(flow))
    lines += [f"collector  {_collector(collector)}" for collector in report["collectors"]]
    lines += [f"learner    {_learner(learner)}" for learner in report["learners"]]
    lines += [f"moments    {name}: {_moments(moments)}" for name, moments in report["moments"].items()]
    if (trace := report["trace"])["state"] != "off":
        lines.append(f"trace      {trace['state']}" + (f" for {trace['on_for_s']:.0f} s" if trace["on_for_s"] is not None else ""))
    told = ("rows_committed", "rows_rejected", "rows_lost", "leases_revoked", "bad_messages", "stale_messages")
    lines.append("counters   " + ", ".join(f"{name.replace('_', ' ')} {counters[name]:,}" for name in told))
    return lines


def _percentiles(found: Mapping[str, float | None]) -> str:
    if found["p50"] is None or found["p99"] is None:
        return "-"
    return f"p50 {human_seconds(found['p50'] * 1e-6)} p99 {human_seconds(found['p99'] * 1e-6)}"


def _minute(flow: Mapping[str, Any]) -> str:
    """The states other than free that took at least a hundredth of the last minute, the longest first."""
    seconds = flow["time_in_state_last_minute_s"]
    whole_s = sum(seconds.values())
    shares = sorted(((100 * s / whole_s, state) for state, s in seconds.items() if state != "free" and s >= whole_s / 100), reverse=True)
    return "; last minute " + ", ".join(f"{state} {share:.0f} %" for share, state in shares) if whole_s and shares else ""


def _collector(c: Mapping[str, Any]) -> str:
    who = f"{c['name']} (pid {c['pid']}, {counted(c['lanes'], 'lane')})"
    return f"{who}: {counted(c['committed_rows'], 'row')}, {counted(c['credits'], 'credit')}{_waits(c)}"


def _learner(c: Mapping[str, Any]) -> str:
    drawn = f"{counted(c['batches'], 'batch', 'batches')}, {counted(c['rows'], 'row')}"
    return f"{c['name']} (pid {c['pid']}): {drawn}, {counted(c['open_leases'], 'lease')}{_waits(c)}"


def _waits(client: Mapping[str, Any]) -> str:
    return f", waits {human_seconds(client['waiting_s'])}: {client['waiting_on']}" if client["waiting_on"] else ""


def _moments(m: Mapping[str, Any]) -> str:
    if not all(isinstance(m[name], float) for name in ("mean", "std", "min", "max")):  # per element, none yet, or beyond float64
        return f"{m['count']:,} rows"
    return f"{m['count']:,} rows, mean {m['mean']:.4g}, std {m['std']:.4g}, {m['min']:.4g} to {m['max']:.4g}"
