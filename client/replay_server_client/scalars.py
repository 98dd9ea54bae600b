"""The status report as one flat dict of numbers, for wandb, TensorBoard and their like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from replay_server_protocol.errors import InvalidRequest, shown

_COLLECTOR = ("published_rows", "committed_rows", "rejected_rows", "masked_rows", "nonfinite_rows", "credits", "waiting_s")
_LEARNER = ("batches", "rows", "dropped", "open_leases", "waiting_s")


def scalars(report: Mapping[str, Any], name: str = "replay") -> dict[str, float]:
    """Numbers of a status report under stable names that start with ``name``; what is not known yet, and what is no number, is left out.

    ``replay/ring/fill`` is the share of the capacity that can be sampled. Element i of a field that isn't scalar is
    ``replay/moments/FIELD/mean/i``. Clients are summed up (``replay/collectors/waiting_s`` …), so that names don't change as they come
    and go.
    """
    if not isinstance(name, str):
        raise InvalidRequest(f"name={shown(name)}: a text that the keys start with")
    numbers = _numbers(report)
    return {f"{name}/{key}": float(n) for key, n in numbers if isinstance(n, int | float) and not isinstance(n, bool)}


def _numbers(report: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    yield "uptime_s", report["uptime_s"]
    ring = report["ring"]
    if ring is not None:
        yield "ring/fill", ring["size_rows"] / ring["capacity_rows"]
        for key in ("size_rows", "committed", "tail", "device_bytes", "host_bytes"):
            yield f"ring/{key}", ring[key]
    for key in ("segments", "host_bytes", "occupied_slots", "waiting_slots"):
        yield f"ingress/{key}", report["ingress"][key]
    yield from _sums("collectors", report["collectors"], _COLLECTOR)
    yield from _sums("learners", report["learners"], _LEARNER)
    for part in ("flow", "rates", "latency", "moments", "episodes", "counters"):
        yield from _walk(part, report.get(part))
    yield from _staleness(report.get("staleness"))
    yield "mailboxes/host_bytes", report["mailboxes"]["host_bytes"]
    yield from _walk("mailboxes", report["mailboxes"]["versions"])


def _sums(part: str, clients: list[Mapping[str, Any]], keys: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    yield f"{part}/count", len(clients)
    for key in keys:
        yield f"{part}/{key}", sum(client[key] for client in clients)


def _staleness(staleness: Mapping[str, Any] | None) -> Iterator[tuple[str, object]]:
    if staleness is None:
        return
    yield "staleness/mean", staleness["mean"]
    yield "staleness/max", staleness["max"]
    for bucket in staleness["buckets"]:
        bound = "more" if bucket["le"] is None else f"le_{bucket['le']}"
        yield f"staleness/rows_{bound}", bucket["rows"]


def _walk(path: str, node: object) -> Iterator[tuple[str, object]]:
    """Every leaf below ``node``, elements of lists by their index."""
    if isinstance(node, Mapping):
        for key, below in node.items():
            yield from _walk(f"{path}/{key}", below)
    elif isinstance(node, list):
        for index, below in enumerate(node):
            yield from _walk(f"{path}/{index}", below)
    else:
        yield path, node
