"""A new server whose memory a learner of an earlier generation still holds waits, says for whom, and serves once it is free."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from replay_server_protocol.errors import BudgetExceeded
from replay_server_protocol.process import ProcessIdentity
from replay_server_protocol.schema import Schema

from replay_server.config import ServerConfig
from replay_server.server import Server

PLENTY = 1 << 40


@pytest.fixture
def holder(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A living process that the run directory says maps an earlier ring."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(process.pid)
    entry = {"pid": process.pid, "start_ticks": identity.start_ticks, "name": "trainer", "generation": 1}
    (run_dir / "again.learners").write_text(json.dumps([entry]))
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    free = [1000]
    monkeypatch.setattr("replay_server.store.free_host_bytes", lambda: free[0])
    return free


@pytest.fixture
def config(run_dir: Path, tmp_path: Path) -> ServerConfig:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(Schema.of(x="float32").to_wire()))
    return ServerConfig(name="again", run_dir=str(run_dir), device="cpu", capacity=1000, schema=str(schema))


def test_server_waits_for_the_learner_that_holds_the_old_ring(
    holder: subprocess.Popen[bytes], free_bytes: list[int], config: ServerConfig
) -> None:
    server = Server(config)
    try:
        assert server.replay.phase.value == "waiting_for_memory"
        reason = server._desk.why_no_ring()
        assert "trainer" in reason
        assert str(holder.pid) in reason
        free_bytes[0] = PLENTY
        server._desk.retry_memory()
        assert server.replay.phase.value == "serving"
        assert server.replay.store is not None
    finally:
        server.close()


def test_server_ends_with_the_numbers_when_nobody_alive_holds_an_old_ring(
    holder: subprocess.Popen[bytes], free_bytes: list[int], config: ServerConfig
) -> None:
    holder.kill()
    holder.wait()
    with pytest.raises(BudgetExceeded, match="needs"):
        Server(config)
