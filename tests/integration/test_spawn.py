"""A sidecar owned by a training script: a name of its own, exported, and an end with its parent."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from replay_server_client import AlreadyServing, Collector, InvalidRequest, Schema, ServerGone
from replay_server_client.status import query
from replay_server_protocol.endpoints import NAME_VARIABLE, RUN_DIR_VARIABLE, Endpoints
from support.processes import Children

from replay_server import ReplayServer

SCHEMA = Schema.of(mark="int64")


def test_a_spawned_server_has_a_unique_name_is_exported_and_leaves_nothing(children: Children) -> None:
    before = {key: os.environ.get(key) for key in (NAME_VARIABLE, RUN_DIR_VARIABLE)}
    with ReplayServer.spawn(capacity=1000, device="cpu", slot_rows=16, columns=["link"]) as server:
        assert (os.environ[NAME_VARIABLE], os.environ[RUN_DIR_VARIABLE]) == (server.name, server.run_dir)
        with Collector.connect(schema=SCHEMA) as collector:
            collector.write({"mark": np.arange(32)})
            assert collector.flush() == 32
        report: dict[str, Any] = server.status()
        assert (report["ring"]["capacity_rows"], report["ring"]["columns"], report["pid"]) == (1000, ["link"], server.pid)
        with ReplayServer.spawn(device="cpu") as second:
            assert (second.name, second.run_dir) != (server.name, server.run_dir)
            assert os.environ[RUN_DIR_VARIABLE] == second.run_dir
        assert os.environ[RUN_DIR_VARIABLE] == server.run_dir
    assert not psutil.pid_exists(server.pid)
    assert not Path(server.run_dir).exists()
    with pytest.raises(ServerGone, match="ended, and its run directory with it"):
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, timeout=0.1)
    assert {key: os.environ.get(key) for key in before} == before
    server.close()


def test_two_spawned_servers_in_one_run_directory_have_two_names(children: Children, run_dir: Path) -> None:
    with ReplayServer.spawn(device="cpu", run_dir=str(run_dir)) as one, ReplayServer.spawn(device="cpu", run_dir=str(run_dir)) as two:
        assert one.name != two.name
        assert (one.status()["pid"], two.status()["pid"]) == (one.pid, two.pid)


def test_a_name_that_is_taken_is_refused_and_its_server_is_not_touched(children: Children, run_dir: Path) -> None:
    with ReplayServer.spawn(device="cpu", run_dir=str(run_dir), name="mine") as server:
        with pytest.raises(AlreadyServing, match=f"pid {server.pid}"):
            ReplayServer.spawn(device="cpu", run_dir=str(run_dir), name="mine")
        assert server.status()["pid"] == server.pid


def test_wrong_options_raise_before_and_after_the_start(children: Children) -> None:
    with pytest.raises(InvalidRequest, match="colour"):
        ReplayServer.spawn(device="cpu", colour="red")
    with pytest.raises(InvalidRequest, match="headroom"):
        ReplayServer.spawn(device="cpu", headroom=8, slot_rows=16)
    with pytest.raises(InvalidRequest, match="True"):
        ReplayServer.spawn(device="cpu", capacity=True)


def test_what_it_printed_can_be_read_while_it_lives_and_once_it_has_died(children: Children) -> None:
    with ReplayServer.spawn(device="cpu", capacity=1000) as server:
        assert f"serving '{server.name}'" in server.log_lines()[0]
        assert Path(f"/proc/{server.pid}/fd/2").read_text("utf-8").splitlines() == server.log_lines()
        with Collector.connect(schema=SCHEMA):
            pass
        os.kill(server.pid, signal.SIGTERM)  # somebody else's doing
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ServerGone, match=r"ended with exit code 0; its log ends: .* INFO closing"):
            server.status()
        assert len(server.log_lines(last=2)) == 2
    assert server.log_lines() == []


def own() -> None:
    """Spawns a server and lives until it is killed."""
    import threading

    from replay_server import ReplayServer

    with ReplayServer.spawn(device="cpu", capacity=1000) as server:
        print(f"{server.pid} {server.name} {server.run_dir} ready", flush=True)
        threading.Event().wait()


def test_it_ends_with_its_parent_also_on_kill_9(children: Children) -> None:
    owner = children.run(own)
    owner.wait_for("ready")
    pid, name, run_dir, _ = owner.output.split()
    server = psutil.Process(int(pid))
    with Collector.connect(name, schema=SCHEMA, run_dir=run_dir) as collector:
        collector.write({"mark": np.arange(5)})
        assert collector.flush() == 5
        os.kill(owner.pid, 9)
        with pytest.raises(ServerGone):
            while True:
                collector.write({"mark": np.arange(5)}, timeout=10)
                collector.flush(timeout=10)
    server.wait(10)
    with pytest.raises(ServerGone):
        query(Endpoints.resolve(name, run_dir), 0.1)
    assert not Path(run_dir).exists()
