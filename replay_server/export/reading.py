"""Numbers out of a status report, whatever it lacks: a ring that is not there yet, a key of another version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Report = Mapping[str, Any]


def found(report: Report | None, path: str) -> Any:
    """What lies at ``ring.size_rows``; None where the path ends early."""
    node: Any = report
    for key in path.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(key)
    return node


def number(report: Report | None, path: str) -> float:
    """The number at ``path``, 0 where there is none."""
    value = found(report, path)
    return float(value) if isinstance(value, int | float) else 0.0


def clients(report: Report | None, side: str) -> list[Report]:
    """The attached ``collectors`` or ``learners``; none while the server is away."""
    value = found(report, side)
    return value if isinstance(value, list) else []


def fill(report: Report | None) -> float:
    """The share of the capacity that can be sampled, 0 to 1; 0 without a ring."""
    capacity_rows = number(report, "ring.capacity_rows")
    return number(report, "ring.size_rows") / capacity_rows if capacity_rows else 0.0
