"""One learner of rings on several GPUs of a host: gathered where they lie, copied to one batch, uniform over the union."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from replay_server_client import AttachRefused, Learner, MultiLearner
from support.gpu import warm_up
from support.markers import is_whole
from support.processes import Children
from support.servers import ServerProcess
from support.shards import Seen, fill, fill_at

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu]
needs_two = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, there are {GPUS}")

Start = Callable[..., ServerProcess]
SIZES = {"g0": 200, "g1": 500}


@pytest.fixture(scope="module", autouse=True)
def _every_gpu_is_warm() -> None:
    """Contexts and the ways between the GPUs: descriptors that stay."""
    for gpu in range(GPUS):
        with torch.cuda.device(gpu):
            warm_up()
        for other in range(GPUS):
            torch.zeros(8, device=f"cuda:{gpu}").copy_(torch.ones(8, device=f"cuda:{other}"))
            torch.cuda.synchronize(gpu)


def start_on_gpus(start: Start, *options: str, gpus: tuple[int, ...] = (0, 1)) -> Path:
    run_dir = Path()
    for shard, ((name, rows), gpu) in enumerate(zip(SIZES.items(), gpus, strict=True)):
        server = start("--device", f"cuda:{gpu}", "--capacity", "2000", "--slot-rows", "16", *options, name=name)
        fill(server, shard, 0, rows)
        run_dir = server.run_dir
    return run_dir


def check_uniform(learner: MultiLearner, device: torch.device, batches: int = 200) -> None:
    seen = Seen(shards=2)
    for number in range(batches):
        batch = learner.sample(1000)
        assert batch["step"].device == device
        if number % 50 == 0:
            assert is_whole({name: field.cpu() for name, field in batch.fields.items()}).all()
        seen.add(batch)
    assert seen.is_uniform, seen.chi_square


def test_two_rings_on_one_gpu_are_uniform_over_the_union(start_server: Start) -> None:
    run_dir = start_on_gpus(start_server, gpus=(0, 0))
    with MultiLearner.connect(list(SIZES), device="cuda", run_dir=run_dir, seed=1, prefetch=2) as learner:
        check_uniform(learner, torch.device("cuda", 0))


@needs_two
@pytest.mark.parametrize("gpu", [0, 1])
def test_rings_on_two_gpus_are_uniform_over_the_union_on_either(start_server: Start, gpu: int) -> None:
    run_dir = start_on_gpus(start_server)
    with MultiLearner.connect(list(SIZES), device=f"cuda:{gpu}", run_dir=run_dir, seed=2, prefetch=2) as learner:
        check_uniform(learner, torch.device("cuda", gpu))


@needs_two
def test_batches_are_whole_while_the_callers_stream_is_busy_with_the_ones_before(start_server: Start) -> None:
    """What is queued on a batch reads its rows, not those of the batch that follows in the same memory."""
    run_dir = start_on_gpus(start_server)
    weights = torch.randn(2048, 2048, device="cuda:0")
    sums, wanted = [], []
    with MultiLearner.connect(list(SIZES), device="cuda:0", run_dir=run_dir, seed=3, prefetch=1) as learner:
        for _ in range(30):
            batch = learner.sample(1000)
            for _ in range(10):
                weights = torch.tanh(weights @ weights)
            check = batch["step"] * 1_000_003 + batch["lane"] * 1009 + batch["collector"]
            sums.append((batch["check"][:, 0] - check).abs().sum())
            wanted.append(batch.ids[:, 3].sum() - batch["step"].sum())
        assert torch.stack(sums).sum().item() == 0
        assert torch.stack(wanted).abs().sum().item() == 0


@needs_two
def test_priorities_go_back_to_the_gpu_they_came_from(start_server: Start) -> None:
    run_dir = start_on_gpus(start_server, "--columns", "priority")
    with MultiLearner.connect(list(SIZES), device="cuda:0", run_dir=run_dir, seed=4, prefetch=0) as learner:
        for _ in range(16):
            batch = learner.sample(2000, by="priority", alpha=0.0, beta=0.5)
            learner.update_priorities(batch, 1.0 + batch["step"].float())
        learner.sample(2000, by="priority", alpha=1.0)
        total = sum(size * (size + 1) / 2 for size in SIZES.values())
        for _ in range(5):
            batch = learner.sample(2000, by="priority", alpha=1.0, beta=0.5)
            priorities = 1.0 + batch["step"].cpu().numpy()
            np.testing.assert_allclose(batch.weights.cpu().numpy(), (1.0 / priorities) ** 0.5, rtol=1e-4)
            assert learner.router.mass == pytest.approx(total)


@needs_two
def test_a_learner_of_one_refuses_another_gpu_by_name(start_server: Start) -> None:
    run_dir = start_on_gpus(start_server)
    with (
        Learner.connect("g1", device="cuda:0", run_dir=run_dir) as learner,
        pytest.raises(AttachRefused, match="cuda:1"),
    ):
        learner.sample(10)


def test_up_serves_from_every_gpu(children: Children, run_dir: Path) -> None:
    command = [sys.executable, "-m", "replay_server", "up", "--name", "g", "--gpus", "all", "--run-dir", str(run_dir), "--capacity", "2000"]
    up = children.start(command, name="up")
    names = [f"g-{place}" for place in range(GPUS)]
    for place, name in enumerate(names):
        up.wait_for(f"serving '{name}'")
        assert f"{name} started on cuda:{place}" in up.output
        fill_at(run_dir, name, place % 2, 0, 300)
    with MultiLearner.connect(names, device="cuda:0", run_dir=run_dir) as learner:
        begun = time.monotonic()
        assert len(set(learner.sample(1000).ids[:, 0].tolist())) == GPUS
        assert time.monotonic() - begun < 30
    up.send_signal(signal.SIGTERM)
    assert up.wait() == 0
