"""`replay-server up`: servers by name, one killed is started again, and at the end nothing is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from replay_server_client import MultiLearner, ServerGone
from replay_server_client.status import query
from replay_server_protocol.endpoints import Endpoints
from support.processes import Child, Children
from support.shards import fill_at

PAGE = Path(__file__).parents[2] / "docs" / "several_gpus.md"
UP = (sys.executable, "-m", "replay_server", "up", "--name", "train", "--capacity", "1000", "--slot-rows", "16")


def start(children: Children, run_dir: Path, *options: str) -> Child:
    return children.start([*UP, "--run-dir", str(run_dir), *options], name="up")


def pids(child: Child) -> list[int]:
    return [int(pid) for pid in re.findall(r"started on cpu \(pid (\d+)\)", child.output)]


def wait_serving(child: Child, name: str, times: int = 1) -> None:
    while child.output.count(f"serving '{name}'") < times:
        assert child.is_alive(), child.output
        assert not child.is_overdue, child.output
        time.sleep(0.02)  # the same words come again: no event tells the second time


def test_a_killed_server_is_started_again_and_sigterm_leaves_nothing(children: Children, run_dir: Path) -> None:
    up = start(children, run_dir, "--cpus", "2")
    for name in ("train-0", "train-1"):
        wait_serving(up, name)
    for shard in range(2):
        fill_at(run_dir, f"train-{shard}", shard, 0, 100)
    with MultiLearner.connect(["train-0", "train-1"], device="cpu", run_dir=run_dir) as learner:
        assert len(learner.sample(100)["collector"].unique()) == 2
        os.kill(pids(up)[1], signal.SIGKILL)
        wait_serving(up, "train-1", 2)
        assert "train-1 killed by SIGKILL after" in up.output
        assert len(learner.sample(100)["collector"].unique()) == 1
    fill_at(run_dir, "train-1", 1, 0, 100)
    example = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert example is not None
    told = children.start([sys.executable, "-W", "error", "-c", example[1]], name="example", REPLAY_SERVER_RUN_DIR=str(run_dir))
    told.wait_for("(100, 100)")
    assert told.wait() == 0
    up.send_signal(signal.SIGTERM)
    assert up.wait() == 0
    assert "stopping train-0, train-1" in up.output
    assert len(pids(up)) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids(up))


def test_a_server_that_can_not_start_ends_all_with_its_exit_code(children: Children, run_dir: Path) -> None:
    up = start(children, run_dir, "--cpus", "2", "--schema", "/no/such/file")
    assert up.wait() == 2
    assert "exit code 2 at its start" in up.output
    assert not any(psutil.pid_exists(pid) for pid in pids(up))


def test_wrong_options_start_nothing(children: Children, run_dir: Path) -> None:
    ups = [start(children, run_dir, *options) for options in (("--cpus", "2", "--depth", "0"), ("--cpus", "0"), ("--device", "cpu"))]
    assert [up.wait() for up in ups] == [2, 2, 2]
    assert not any("started" in up.output for up in ups)


def test_servers_stopped_one_by_one_stay_stopped_and_the_last_ends_it(children: Children, run_dir: Path) -> None:
    up = start(children, run_dir, "--cpus", "2")
    for name in ("train-0", "train-1"):
        wait_serving(up, name)
        stop = [sys.executable, "-m", "replay_server", "stop", "--name", name, "--run-dir", str(run_dir)]
        assert children.start(stop, name="stop").wait() == 0
        up.wait_for(f"{name} stopped in good order")
    assert up.wait() == 0
    assert len(pids(up)) == 2


def test_servers_end_with_a_watcher_that_is_killed(children: Children, run_dir: Path) -> None:
    up = start(children, run_dir, "--cpus", "2")
    for name in ("train-0", "train-1"):
        wait_serving(up, name)
    served = [psutil.Process(pid) for pid in pids(up)]
    os.kill(up.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(served, timeout=10)
    assert not alive


def test_servers_are_watched_also_where_nobody_reads_what_is_told(children: Children, run_dir: Path) -> None:
    reader, writer = os.pipe()
    command = [*UP, "--run-dir", str(run_dir), "--cpus", "1"]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.DEVNULL, start_new_session=True)
    filler = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)  # a description of its own: the other one still blocks
    try:
        end_s = time.monotonic() + 20
        while not (run_dir / "train-0.status").exists():
            assert time.monotonic() < end_s
            time.sleep(0.02)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(filler, b"x")
        endpoints = Endpoints.resolve("train-0", run_dir)
        first = pid = pid_of(endpoints)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        while pid is None or pid == first:
            pid = pid_of(endpoints)
            assert time.monotonic() < end_s, "it was not started again"
            time.sleep(0.05)
        process.terminate()
        assert process.wait(10) == 0
        assert not psutil.pid_exists(pid)
    finally:
        process.kill()
        os.close(reader)
        os.close(writer)
        os.close(filler)


def pid_of(endpoints: Endpoints) -> int | None:
    with contextlib.suppress(ServerGone):
        return int(str(query(endpoints, 2.0)["pid"]))
    return None
