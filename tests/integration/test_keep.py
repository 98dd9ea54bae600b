"""A server that is kept from one script to the next, runs that are told apart, and one server for each local rank."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from replay_server_client import AttachRefused, Collector, InvalidRequest, Learner, Schema
from replay_server_client.admin import Admin
from replay_server_protocol.endpoints import Endpoints
from support.processes import Children

from replay_server import ReplayServer

SCHEMA = Schema.of(mark="int64")


def start_and_leave(run_dir: str) -> int:
    """A script that keeps a server, writes to it and ends."""
    import numpy as np
    from replay_server_client import Collector, Schema

    from replay_server import ReplayServer

    schema = Schema.of(mark="int64")
    with ReplayServer.spawn(keep=True, name="kept", run_dir=run_dir, device="cpu", capacity=1000, run_id="run-7") as server:
        with Collector.connect(schema=schema, run_id="run-7") as collector:
            collector.write({"mark": np.arange(64)})
            collector.flush()
        return server.pid


@pytest.fixture
def kept_dir(crash_dir: Path) -> Iterator[str]:
    """A run directory whose servers are stopped at the end."""
    yield str(crash_dir)
    for path in crash_dir.glob("*.control"):
        with Admin.connect(path.stem, run_dir=crash_dir) as admin:
            admin.stop()
    end = time.monotonic() + 10
    while list(crash_dir.glob("*.lock")):
        assert time.monotonic() < end, "a kept server did not stop"
        time.sleep(0.02)


def test_a_kept_server_survives_its_script_and_the_next_one_finds_it(children: Children, kept_dir: str) -> None:
    pid = children.run(start_and_leave, kept_dir).result()
    options: dict[str, Any] = {"name": "kept", "run_dir": kept_dir, "device": "cpu"}
    with ReplayServer.spawn(keep=True, capacity=1000, run_id="run-7", **options) as server:
        assert server.pid == pid
        assert server.status()["ring"]["committed"] == 64
        with pytest.raises(AttachRefused, match="capacity is 1000, not 2000; depth is 2, not 3"):
            ReplayServer.spawn(keep=True, capacity=2000, depth=3, **options)
        with pytest.raises(AttachRefused, match=r"run 'run-7'.*run 'run-8'"):
            ReplayServer.spawn(keep=True, capacity=1000, run_id="run-8", **options)
        for client in (Collector.connect, Learner.connect):
            with pytest.raises(AttachRefused, match=r"run 'run-8'.*run 'run-7'"):
                client(schema=SCHEMA, run_id="run-8")
    assert (Path(kept_dir) / "kept.log").exists()
    with pytest.raises(InvalidRequest, match="keep"):
        ReplayServer.spawn(keep="yes", **options)  # type: ignore[arg-type]


def test_another_schema_is_refused_naming_the_field(children: Children, kept_dir: str, tmp_path: Path) -> None:
    children.run(start_and_leave, kept_dir).result()
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(Schema.of(mark="float32").to_wire()))
    with pytest.raises(AttachRefused, match="mark is int64, not float32"):
        ReplayServer.spawn(keep=True, name="kept", run_dir=kept_dir, device="cpu", capacity=1000, schema=str(file))


def rank_with_its_server(rank: int, port: int, run_dir: str) -> list[int]:
    """One rank of two, as torchrun starts it: its own server by its local rank, and one sum over both."""
    import os

    import numpy as np
    import torch
    import torch.distributed
    from replay_server_client import Collector, Learner, Schema

    from replay_server import ReplayServer

    schema = Schema.of(mark="int64")
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo")
    with (
        ReplayServer.spawn(keep=True, name="gpu{local_rank}", run_dir=run_dir, device="cpu", capacity=1000) as server,
        Collector.connect("gpu{local_rank}", schema=schema) as collector,
        Learner.connect("gpu{local_rank}") as learner,
    ):
        assert server.name == f"gpu{rank}"
        collector.write({"mark": np.full(64, rank)})
        collector.flush()
        mine = learner.sample(16)["mark"]
        total = mine.clone()
        torch.distributed.all_reduce(total)
        torch.distributed.destroy_process_group()
        return [int(mine.min()), int(mine.max()), int(total.sum())]


def test_of_two_scripts_that_keep_one_server_at_once_one_starts_it(kept_dir: str) -> None:
    def pid(_: int) -> int:
        return ReplayServer.spawn(keep=True, name="kept", run_dir=kept_dir, device="cpu", capacity=1000).pid

    with ThreadPoolExecutor(2) as both:
        first, second = both.map(pid, range(2))
    assert first == second


def test_two_ranks_find_a_server_each_by_their_local_rank(children: Children, kept_dir: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [children.run(rank_with_its_server, rank, port, kept_dir) for rank in range(2)]
    assert [rank.result() for rank in ranks] == [[0, 0, 16], [1, 1, 16]]


def test_a_name_by_local_rank_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(InvalidRequest, match="LOCAL_RANK"):
        Endpoints.resolve("gpu{local_rank}")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert Endpoints.resolve("gpu{local_rank}").name == "gpu3"
