"""Device memory stays flat whatever comes and goes: servers, learners in good order or killed, leases by the hundred thousand."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replay_server_client import Collector, Learner, Schema, ServerClosing
from support.gpu import MIB, settled_bytes, used_bytes, wait_used_at_most
from support.processes import Children
from support.reports import report_of, wait_report
from support.servers import ServerProcess, spawn_server

pytestmark = pytest.mark.gpu

ROWS = Schema.of(mark="int64", wide=("float32", 500))
RING_BYTES = 40_000 * ROWS.stride
OPTIONS = ("--device", "cuda", "--capacity", "36000", "--headroom", "4000", "--slot-rows", "512")
SLACK_BYTES = 4 * MIB
"""Two blocks of the driver's; a leaked ring has 80 MB."""
RESTARTS, LEASES, KILLS, LEARNERS = 50, 100_000, 20, 24


def fill(server: ServerProcess, first: int, n: int = 512) -> int:
    with Collector.connect(server.name, schema=ROWS, run_dir=server.run_dir, timeout=20.0) as collector:
        collector.write({"mark": np.arange(first, first + n), "wide": np.zeros((n, 500), np.float32)})
        return collector.flush(20.0)


def attach(server: ServerProcess, **options: Any) -> Learner:
    return Learner.connect(server.name, run_dir=server.run_dir, device="cuda", timeout=20.0, **options)


@pytest.mark.timeout(300)
def test_memory_is_flat_over_50_restarts_of_the_server_under_one_learner(children: Children, crash_dir: Path) -> None:
    used: list[int] = []
    server = spawn_server(children, crash_dir, *OPTIONS)
    with attach(server, prefetch=0) as learner:
        for life in range(RESTARTS):
            fill(server, first=1000 * life)
            batch = learner.sample(256, timeout=20.0)
            assert 1000 * life <= int(batch["mark"].min()) <= int(batch["mark"].max()) < 1000 * life + 512
            assert learner.statistics().generations == life + 1
            used.append(used_bytes())
            if life % 2:
                server.kill()
            else:
                assert server.stop() == 0
                with pytest.raises(ServerClosing):
                    learner.sample(256)
            server = spawn_server(children, crash_dir, *OPTIONS, name=server.name)
    wait_report(server, lambda found: found["phase"])
    assert server.stop() == 0
    assert max(used[2:]) - min(used[2:]) <= SLACK_BYTES, [round(each / MIB) for each in used]


def test_memory_descriptors_and_addresses_are_flat_over_100_000_leases_of_two_learners(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server(*OPTIONS)
    allocated = torch.cuda.memory_allocated()
    with attach(server, name="a") as one, attach(server, name="b") as two:
        fill(server, 0)
        learners = (one, two)
        for learner in (*learners, *learners, *learners):
            learner.sample(64)
        before = _holdings(server.pid)
        addresses: tuple[set[int], set[int]] = (set(), set())
        for _ in range(LEASES // 2):
            for learner, seen in zip(learners, addresses, strict=True):
                seen.add(learner.sample(64)["mark"].data_ptr())
        after = _holdings(server.pid)
        assert [len(seen) for seen in addresses] == [2, 2]
        assert abs(after["device_bytes"] - before["device_bytes"]) <= SLACK_BYTES
        assert after["descriptors"] == before["descriptors"]
        assert after["resident_bytes"] - before["resident_bytes"] <= 16 * MIB
        report = wait_report(server, lambda found: sum(each["open_leases"] for each in found["learners"]) <= 2)
        assert report["counters"]["batches_granted"] >= LEASES
        assert report["counters"]["leases_revoked"] == 0
    del learner, learners, one, two
    gc.collect()
    assert torch.cuda.memory_allocated() == allocated, "batch buffers outlive their learner"


def test_learners_one_after_the_other_hold_no_more_than_the_first(start_server: Callable[..., ServerProcess]) -> None:
    """torch keeps memory for each stream and each graph pool that it has seen."""
    server = start_server(*OPTIONS, "--columns", "link,priority")
    fill(server, 0)
    reserved: list[int] = []
    for number in range(LEARNERS):
        learner = attach(server, prefetch=number % 3)
        for _ in range(2):
            learner.sample(2048)
            learner.sample(2048, by="priority")
            learner.sample(512, half_life_rows=100.0)
        if number % 4:
            learner.close()
        del learner  # dropped without a word, one in four
        gc.collect()
        reserved.append(torch.cuda.memory_reserved())
    wait_report(server, lambda found: not found["learners"])
    assert max(reserved[6:]) <= max(reserved[:6]) + SLACK_BYTES, [round(each / MIB) for each in reserved]


def sample_until_killed(name: str, run_dir: str) -> None:
    from replay_server_client import Learner

    with Learner.connect(name, run_dir=run_dir, device="cuda", prefetch=2, timeout=30.0) as learner:
        learner.sample(4096, timeout=30.0)
        print("sampling", flush=True)
        while True:
            learner.sample(4096, timeout=30.0)


def test_learners_killed_in_the_middle_of_sampling_leave_nothing(start_server: Callable[..., ServerProcess], children: Children) -> None:
    server = start_server(*OPTIONS)
    fill(server, 0)
    baseline = settled_bytes()
    for _ in range(2):
        victims = [children.run(sample_until_killed, server.name, str(server.run_dir)) for _ in range(KILLS // 2)]
        for victim in victims:
            victim.wait_for("sampling")
        assert used_bytes() > baseline + SLACK_BYTES
        for victim in victims:
            victim.kill()
        wait_used_at_most(baseline + SLACK_BYTES)
    report = wait_report(server, lambda found: not found["learners"])
    assert report["counters"]["sessions_lost"] == KILLS
    fill(server, 512, 40_000)  # more than the headroom: a lease left open would hold it up


def test_a_mapping_outlives_the_killed_server_and_is_free_once_the_learner_lets_go(children: Children, crash_dir: Path) -> None:
    baseline = settled_bytes()
    server = spawn_server(children, crash_dir, *OPTIONS)
    with attach(server, prefetch=0) as learner:
        fill(server, 0)
        learner.progress()  # from here on nothing happens to the mapping but in this test's calls
        learner.sample(64)
        ring = learner._engine.conversation.ring
        assert ring is not None
        rows = ring.mapping.tensors.rows
        before = rows[:512].clone()
        server.kill()
        assert torch.equal(rows[:512], before)
        assert int(before[511, :8].view(torch.int64)) == 511
        held = wait_used_at_most(baseline + RING_BYTES + 64 * MIB)
        assert held >= baseline + RING_BYTES, "the learner keeps the ring's memory alive"
        del rows, ring, before
        learner.progress()
        assert learner.schema is None, "the loss of the server was noticed"
        wait_used_at_most(held - RING_BYTES)
    successor = spawn_server(children, crash_dir, *OPTIONS, name=server.name)  # sweeps what the killed one left
    wait_report(successor, lambda found: found["phase"])
    assert successor.stop() == 0
    wait_used_at_most(baseline + SLACK_BYTES)


def test_a_stopped_server_gives_all_device_memory_back(children: Children, crash_dir: Path) -> None:
    baseline = settled_bytes()
    server = spawn_server(children, crash_dir, *OPTIONS)
    fill(server, 0)
    assert used_bytes() >= baseline + RING_BYTES
    assert report_of(server)["ring"]["device_bytes"] >= RING_BYTES
    assert server.stop() == 0
    wait_used_at_most(baseline + SLACK_BYTES)


def test_ten_times_the_capacity_costs_device_memory_and_nothing_on_the_host(start_server: Callable[..., ServerProcess]) -> None:
    """The server's own resident memory holds its slots, too: they are mapped and page-locked there."""
    told, taken, resident = [], [], []
    for capacity in (36_000, 360_000):
        baseline = settled_bytes()
        server = start_server("--device", "cuda", "--capacity", str(capacity), "--headroom", "4000", "--slot-rows", "512")
        fill(server, 0, 4000)
        told.append(report_of(server)["ring"]["device_bytes"])
        taken.append(used_bytes() - baseline)
        resident.append(_holdings(server.pid)["resident_bytes"])
        assert server.stop() == 0
    assert abs(told[1] - told[0] - 324_000 * ROWS.stride) <= SLACK_BYTES
    assert abs(taken[1] - taken[0] - (told[1] - told[0])) <= SLACK_BYTES
    assert abs(resident[1] - resident[0]) < 0.01 * resident[0]


def _holdings(server_pid: int) -> dict[str, int]:
    """What the GPU, the server and this process hold."""
    pages = int(Path(f"/proc/{server_pid}/statm").read_text("ascii").split()[1])
    return {
        "device_bytes": used_bytes(),
        "descriptors": len(os.listdir(f"/proc/{server_pid}/fd")) + len(os.listdir("/proc/self/fd")),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }
