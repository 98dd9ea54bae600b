"""Limits that a container or a service manager set on this process: memory and processors of its control group.

Both hierarchies are read, the unified one (v2) and the older one (v1). A limit holds for a group and all below it, so the groups above
this process's are asked, too; inside a container its own group may be all that can be seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PROC = Path("/proc/self/cgroup")
_NO_LIMIT_BYTES = 2**60
"""v1 says "none" as the largest multiple of a page."""


def free_memory_bytes(root: Path = _ROOT, proc: Path = _PROC) -> int | None:
    """What the tightest group still lets its processes take (shared memory counts), or None where nothing limits it."""
    frees = []
    for folder, limit_name, used_name in _memory_groups(root, proc):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and limit < _NO_LIMIT_BYTES:
            frees.append(max(0, limit - used))
    return min(frees, default=None)


def processors(root: Path = _ROOT, proc: Path = _PROC) -> float | None:
    """Processors whose time this group may use up, or None where nothing limits it."""
    found = []
    for folder in _groups(root, proc, ""):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text("ascii").split()
            found.append(int(quota) / int(period))  # "max" is no number
    for folder in _groups(root, proc, "cpu"):
        quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_us and period_us and quota_us > 0:
            found.append(quota_us / period_us)
    return min(found, default=None)


def _memory_groups(root: Path, proc: Path) -> Iterator[tuple[Path, str, str]]:
    for folder in _groups(root, proc, ""):
        yield folder, "memory.max", "memory.current"
    for folder in _groups(root, proc, "memory"):
        yield folder, "memory.limit_in_bytes", "memory.usage_in_bytes"


def _groups(root: Path, proc: Path, controller: str) -> Iterator[Path]:
    """This process's group and those above it; the empty name is that of the unified hierarchy."""
    base = root / controller if controller else root
    path = Path()
    with contextlib.suppress(OSError):
        for line in proc.read_text("utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if controller in controllers.split(","):
                path = Path(name.lstrip("/"))
    for part in (path, *path.parents) if path.parts else (path,):
        if ".." not in part.parts:  # a group above what this namespace shows
            yield base / part


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None
