"""Device memory and page-locked memory run out: a typed error before any harm, and the server serves on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from replay_server_client import BudgetExceeded, Collector, Learner
from support.markers import MARKERS, is_whole, marker_steps
from support.processes import Children
from support.reports import assert_conserved, report_of
from support.servers import ServerProcess, spawn_server

pytestmark = pytest.mark.gpu
ON_CUDA = ("--device", "cuda", "--slot-rows", "16")
RESERVE_BYTES = 512 << 20


def assert_serves(server: ServerProcess) -> None:
    with (
        Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cuda", prefetch=0) as learner,
    ):
        collector.write(marker_steps(1, 1, 0, 32))
        batch = learner.sample(64, min_committed=collector.flush())
        assert is_whole({name: batch[name].cpu() for name in ("collector", "lane", "step", "check", "reward")}).all()
    assert_conserved(report_of(server))


def test_a_ring_that_does_not_fit_beside_others_is_refused_and_fits_once_they_are_gone(start_server: Callable[..., ServerProcess]) -> None:
    ring_bytes = 2 << 30
    server = start_server(*ON_CUDA, "--capacity", str(ring_bytes // MARKERS.stride))
    free_bytes, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free_bytes - RESERVE_BYTES - ring_bytes // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(BudgetExceeded) as refused:
        Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir)
    needed, free = refused.value.details["needed_bytes"], refused.value.details["free_bytes"]
    assert isinstance(needed, int)
    assert isinstance(free, int)
    assert needed > ring_bytes > free
    report = report_of(server)
    assert (report["phase"], report["ring"]) == ("waiting_for_schema", None)
    del hog
    torch.cuda.empty_cache()
    assert_serves(server)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_learner_without_memory_for_its_batches_fails_alone(start_server: Callable[..., ServerProcess], prefetch: int) -> None:
    batch_rows = (1 << 30) // MARKERS.stride
    server = start_server(*ON_CUDA, "--capacity", str(batch_rows))
    with (
        Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cuda", prefetch=prefetch) as learner,
    ):
        collector.write(marker_steps(1, 1, 0, 32))
        collector.flush()
        free_bytes, _ = torch.cuda.mem_get_info()
        hog = torch.empty(free_bytes - RESERVE_BYTES, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            learner.sample(batch_rows, timeout=10)
        batch = learner.sample(8)
        assert is_whole({name: batch[name].cpu() for name in ("collector", "lane", "step", "check", "reward")}).all()
        del hog
        torch.cuda.empty_cache()
    assert report_of(server)["counters"]["leases_revoked"] == 0
    assert_serves(server)


def test_with_little_memory_to_lock_slots_are_copied_one_way_or_the_other(children: Children, run_dir: Path) -> None:
    server = spawn_server(children, run_dir, *ON_CUDA, "--capacity", "1000", within=["sh", "-c", 'ulimit -l 64 && exec "$@"', "sh"])
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir):
        (collector,) = report_of(server)["collectors"]
        assert collector["copied_as"].startswith(("pinned", "pageable: cudaHostRegister"))
    assert_serves(server)
    assert server.stop() == 0


def test_the_doctor_finds_gpu_driver_and_sharing_in_order(crash_dir: Path) -> None:
    command = [sys.executable, "-m", "replay_server", "doctor", "--device", "cuda", "--json", "--run-dir", str(crash_dir)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = {finding["name"]: finding for finding in json.loads(ended.stdout)["findings"]}
    for name in ("driver", "visible GPUs", "CUDA IPC", "locked memory"):
        assert found[name]["verdict"] == "ok", found[name]
    assert str(torch.cuda.get_device_properties(0).uuid) in found["driver"]["found"]
