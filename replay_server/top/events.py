"""What happened between two status reports, in words. Pure: two reports in, lines out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LONG_S = 1.0
"""A side that waits for a shorter time is no event: in step, they take turns many times a second."""

_COUNTED = {
    "rows_rejected": "rows rejected",
    "rows_lost": "rows lost",
    "nonfinite_rows": "rows kept that are not finite",
    "leases_revoked": "leases revoked: a learner held one longer than --lease",
    "bad_messages": "bad messages",
    "connections_refused": "connections turned away: too few files may be opened",
    "stale_messages": "messages of an earlier session or generation",
    "sessions_lost": "sessions lost",
}
"""Counters whose rise somebody should see, and how it reads after its number."""

Client = tuple[str, str, int]
"""collectors or learners, name, pid."""


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What happened from one report to the next: of one server, or of two that followed each other under one name."""
    if (before["pid"], before["generation"]) != (after["pid"], after["generation"]):
        return [f"another server: pid {after['pid']}, generation {after['generation']}; its ring is a new one"]
    return [*_phase(before, after), *_clients(before, after), *_flow(before["flow"], after["flow"]), *_counters(before, after)]


def clients_of(report: Mapping[str, Any]) -> dict[Client, Mapping[str, Any]]:
    """Every attached client's part of the report."""
    return {(kind, c["name"], c["pid"]): c for kind in ("collectors", "learners") for c in report[kind]}


def _phase(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    if before["phase"] != after["phase"]:
        yield f"phase {after['phase']} after {before['phase']}"


def _clients(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    were, are = clients_of(before), clients_of(after)
    yield from (f"{_told(client)} left" for client in were if client not in are)
    for client, part in are.items():
        if client not in were:
            yield f"{_told(client)} came"
        elif part["state"] != were[client]["state"] != "greeted":
            yield f"{_told(client)} is {part['state']}"


def _told(client: Client) -> str:
    kind, name, pid = client
    return f"{kind.removesuffix('s')} {name} (pid {pid})"


def _flow(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    was_long, is_long = (flow["blocked_side"] is not None and flow["since_s"] >= LONG_S for flow in (before, after))
    goes_on = before["state"] == after["state"] and before["since_s"] <= after["since_s"]
    if was_long and not goes_on:
        yield f"{before['state']} ended after {before['since_s']:.1f} s or more"
    if is_long and not (was_long and goes_on):
        yield f"{after['state']}: {after['reason']}"


def _counters(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name, words in _COUNTED.items():
        rise = after["counters"][name] - before["counters"][name]
        if rise > 0:
            yield f"{rise:,} {words}"
