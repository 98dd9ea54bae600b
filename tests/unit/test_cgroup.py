"""Limits of control groups, as the kernel writes them, in both hierarchies."""

from __future__ import annotations

from pathlib import Path

from replay_server.cgroup import free_memory_bytes, processors


def group(root: Path, proc: Path, **files: str) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


def test_no_group_limits_nothing(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path, tmp_path / "none") is None
    assert processors(tmp_path, tmp_path / "none") is None


def test_the_tightest_group_above_this_process_counts(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/slice/service\n")
    group(tmp_path, proc, slice__memory_dot_max="1000", slice__memory_dot_current="900")
    group(tmp_path, proc, slice__service__memory_dot_max="500", slice__service__memory_dot_current="100", memory_dot_max="max")
    assert free_memory_bytes(tmp_path, proc) == 100
    group(tmp_path, proc, slice__service__cpu_dot_max="150000 100000", slice__cpu_dot_max="max 100000")
    assert processors(tmp_path, proc) == 1.5


def test_inside_a_container_the_root_is_its_own_group(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/\n")
    group(tmp_path, proc, memory_dot_max="4096", memory_dot_current="8192")
    assert free_memory_bytes(tmp_path, proc) == 0, "over its limit, not below nothing"


def test_the_older_hierarchy_is_read_too(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n0::/\n")
    group(tmp_path, proc, memory__docker__x__memory_dot_limit_in_bytes="1000", memory__docker__x__memory_dot_usage_in_bytes="1")
    group(tmp_path, proc, memory__memory_dot_limit_in_bytes="9223372036854771712", memory__memory_dot_usage_in_bytes="77")
    group(tmp_path, proc, cpu__docker__x__cpu_dot_cfs_quota_us="50000", cpu__docker__x__cpu_dot_cfs_period_us="100000")
    assert free_memory_bytes(tmp_path, proc) == 999
    assert processors(tmp_path, proc) == 0.5
