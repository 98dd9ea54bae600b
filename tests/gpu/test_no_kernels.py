"""The daemon only copies: while it serves it launches no kernel and allocates no device memory. A profiler inside it tells."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_server_client import Collector, Learner
from support.markers import MARKERS, marker_steps
from support.servers import ServerProcess

pytestmark = pytest.mark.gpu

ALLOCATIONS = ("cudaMalloc", "cuMemAlloc", "cuMemCreate")
LAUNCHES = ("Launch",)  # kernels, cooperative ones, graphs and host functions


def counted(trace: Path) -> dict[str, Counter[str]]:
    """Events by category (kernel, gpu_memcpy, gpu_memset, cuda_runtime, cuda_driver) and name."""
    found: dict[str, Counter[str]] = {}
    for event in json.loads(trace.read_text("utf-8"))["traceEvents"]:
        if event.get("ph") == "X":
            found.setdefault(event.get("cat", ""), Counter())[event["name"]] += 1
    return found


def calls(found: dict[str, Counter[str]], words: tuple[str, ...]) -> list[str]:
    names = {*found.get("cuda_runtime", ()), *found.get("cuda_driver", ())}
    return sorted(name for name in names if any(word in name for word in words))


def test_the_daemon_launches_no_kernel_and_allocates_nothing_while_it_serves(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    schema, trace = tmp_path / "schema.json", tmp_path / "trace.json"
    schema.write_text(json.dumps(MARKERS.to_wire()), "utf-8")
    columns = ("--columns", "link,priority", "--moments", "reward")
    sizes = ("--capacity", "4096", "--slot-rows", "512")
    server = start_server("--device", "cuda", "--schema", str(schema), *columns, *sizes, "--debug-profile", str(trace))
    slots = 100
    with (
        Collector.connect(server.name, schema=MARKERS, lanes=8, run_dir=server.run_dir, timeout=20.0) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cuda", timeout=20.0) as learner,
    ):
        for step in range(slots):
            collector.write(marker_steps(1, 8, 64 * step, 64))
            seq = collector.flush(20.0)
            learner.sample(256, min_committed=seq if step % 10 == 0 else 0, timeout=20.0)
    assert server.stop() == 0
    found = counted(trace)
    copies = found.get("gpu_memcpy", Counter())
    to_device = sum(n for name, n in copies.items() if "HtoD" in name)
    assert to_device >= slots, f"the profiler must have seen the copies: {found}"
    assert to_device == copies.total(), copies
    assert found.get("cuda_runtime") or found.get("cuda_driver"), "the profiler must have seen the calls"
    assert "kernel" not in found, found["kernel"]
    assert "gpu_memset" not in found, found["gpu_memset"]
    assert calls(found, ALLOCATIONS) == []
    assert calls(found, LAUNCHES) == []
