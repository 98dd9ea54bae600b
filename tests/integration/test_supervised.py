"""A server under a supervisor that listens as systemd does: ready, alive, stopping."""

from __future__ import annotations

import json
import signal
import socket
import sys
import textwrap
from pathlib import Path

import pytest
from replay_server_client import Schema
from support.processes import Children


@pytest.mark.parametrize("has_schema", [False, True], ids=["sockets bound", "ring made"])
def test_readiness_signs_of_life_and_the_stop_are_told(children: Children, run_dir: Path, tmp_path: Path, has_schema: bool) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(Schema.of(obs=("float32", 3)).to_wire()), "utf-8")
    command = [sys.executable, "-m", "replay_server", "serve", "--name", "told", "--run-dir", str(run_dir), "--device", "cpu"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(20)
        command += ["--schema", str(schema)] if has_schema else []
        server = children.start(command, name="server", NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="400000")
        first = listener.recv(4096).decode().splitlines()
        assert sorted(first) == ["READY=1", f"STATUS={'serving' if has_schema else 'waiting for schema'}", "WATCHDOG=1"]
        assert [listener.recv(4096).decode() for _ in range(2)] == ["WATCHDOG=1"] * 2
        server.send_signal(signal.SIGTERM)
        while (said := listener.recv(4096).decode()) != "STOPPING=1":
            assert said == "WATCHDOG=1"
        assert server.wait() == 0


def test_a_server_that_a_script_owns_does_not_speak_for_the_script(children: Children, run_dir: Path, tmp_path: Path) -> None:
    owner = """
    import os, sys
    from replay_server import ReplayServer

    with ReplayServer.spawn(capacity=100, device="cpu", run_dir=sys.argv[1]) as server:
        print(server.status()["phase"])
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        command = [sys.executable, "-c", textwrap.dedent(owner), str(run_dir)]
        owned = children.start(command, name="owner", NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert owned.wait() == 0
        assert "waiting_for_schema" in owned.output
        with pytest.raises(BlockingIOError):
            listener.recv(4096)
