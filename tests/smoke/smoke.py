"""Run from outside the tree: the wheel's own packages serve, collect and learn. A script, not a test of pytest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import replay_server_client
import replay_server_protocol
from replay_server_client import Collector, Schema
from replay_server_client.status import query
from replay_server_protocol.endpoints import Endpoints

import replay_server

CHECKOUT = Path(__file__).resolve().parents[2]
COMMAND = Path(sys.executable).with_name("replay-server")
ROWS = 64
HAS_TORCH = importlib.util.find_spec("torch") is not None
"""Without it the learner is left out: the daemon and the collector need none."""


def check_packages() -> None:
    for package in (replay_server, replay_server_client, replay_server_protocol):
        assert package.__file__ is not None
        path = Path(package.__file__).resolve()
        assert not path.is_relative_to(CHECKOUT), f"{path} is the tree's, not the wheel's"
        assert path.is_relative_to(Path(sys.prefix).resolve()), f"{path} is not this environment's"
        assert path.with_name("py.typed").exists(), f"{path.parent} has no py.typed"


def check_version() -> None:
    printed = subprocess.run([COMMAND, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    assert replay_server.__version__ == importlib.metadata.version("replay-server")
    assert replay_server.__version__ in printed, printed


def make_round_trip(run_dir: str) -> None:
    """Rows 0, 1, 2 … go in; every sampled row is one of them, and its seq says which."""
    schema = Schema.of(step="int64", obs=("float32", 3))
    steps = np.arange(ROWS)
    rows = {"step": steps, "obs": np.repeat(steps, 3).reshape(ROWS, 3).astype(np.float32)}
    with Collector.connect("smoke", schema=schema, run_dir=run_dir, timeout=20.0) as collector:
        collector.write(rows, timeout=10.0)
        committed = collector.flush(timeout=10.0)
        assert committed == ROWS, committed
        counters = query(Endpoints.resolve("smoke", run_dir), 10.0)["counters"]
        assert isinstance(counters, dict)
        assert counters["rows_committed"] == ROWS
        if HAS_TORCH:
            learn(run_dir, committed)


def learn(run_dir: str, committed: int) -> None:
    from replay_server_client import Learner

    with Learner.connect("smoke", device="cpu", seed=1, run_dir=run_dir, timeout=20.0) as learner:
        batch = learner.sample(256, min_committed=committed, timeout=10.0)
        assert batch["step"].tolist() == batch.seqs.tolist()
        assert batch["obs"][:, 2].tolist() == batch.seqs.tolist()
        assert len(set(batch.seqs.tolist())) > ROWS // 2


def main() -> None:
    check_packages()
    check_version()
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp") as run_dir:
        options = ["--name", "smoke", "--run-dir", run_dir, "--device", "cpu", "--capacity", "256", "--slot-rows", "16"]
        server = subprocess.Popen([COMMAND, "serve", *options])
        try:
            make_round_trip(run_dir)
            server.terminate()
            assert server.wait(20) == 0
        finally:
            server.kill()
            server.wait()
    learned = "and learns" if HAS_TORCH else "(no torch here: no learner)"
    print(f"smoke, Python {sys.version.split()[0]}: the wheel serves, collects {learned}")


if __name__ == "__main__":
    main()
