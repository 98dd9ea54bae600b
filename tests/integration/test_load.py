"""`replay-server load FILE`: offline rows in the ring, in order, outside flow control; what doesn't fit is refused by name."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from replay_server_client import Collector, Observer, Schema
from replay_server_client.status import query
from support.servers import ServerProcess

from replay_server.snapshot.writer import take_snapshot

Start = Callable[..., ServerProcess]
Arrays = dict[str, npt.NDArray[Any]]

SCHEMA = Schema.of(
    obs=("float32", 3), action=("float32", 1), reward="float32", next_obs=("float32", 3), terminated="bool", truncated="bool"
)
LENGTHS = (5, 7, 4)
ENDS = np.cumsum(LENGTHS) - 1
ROWS = sum(LENGTHS)


def minari() -> Arrays:
    """Three episodes, the second one truncated, each with one observation more than rows: observation k is k everywhere."""
    terminations, truncations = np.zeros(ROWS, bool), np.zeros(ROWS, bool)
    terminations[ENDS[[0, 2]]] = True
    truncations[ENDS[1]] = True
    observations = np.repeat(np.arange(ROWS + len(LENGTHS), dtype=np.float32)[:, None], 3, 1)
    rewards = np.arange(ROWS, dtype=np.float32)
    actions = rewards[:, None] * 2
    return {"observations": observations, "actions": actions, "rewards": rewards, "terminations": terminations, "truncations": truncations}


def load(server: ServerProcess, file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "replay_server", "load", str(file), "--name", server.name, "--run-dir", str(server.run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def save(file: Path, arrays: Arrays, compression: int = zipfile.ZIP_STORED) -> None:
    """As numpy.savez."""
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.save(member, array)


def report(server: ServerProcess) -> dict[str, Any]:
    return query(server.endpoints, 5.0)


def all_rows(server: ServerProcess) -> dict[str, npt.NDArray[np.generic]]:
    with Observer.connect(server.name, run_dir=server.run_dir) as observer:
        return observer.read(newest=1 << 30).fields


def test_episodes_of_one_observation_more_give_every_row_its_next_one(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--capacity", "100", "--slot-rows", "16", "--samples-per-insert", "1", "--tolerance", "20")
    save(tmp_path / "d.npz", minari())
    done = load(server, tmp_path / "d.npz")
    assert done.returncode == 0, done.stderr
    found = all_rows(server)
    here = np.arange(ROWS) + np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    assert (found["obs"] == here[:, None]).all()
    assert (found["next_obs"] == here[:, None] + 1).all()
    assert (found["reward"] == np.arange(ROWS)).all()
    assert report(server)["flow"]["samples_per_insert"] is None, "nothing of it was counted"


def test_without_next_observations_a_truncated_row_is_left_out_and_no_chain_leads_over_it(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--capacity", "100", "--slot-rows", "16", "--columns", "link")
    flat = minari() | {"observations": np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], 3, 1)}
    save(tmp_path / "d.npz", flat, zipfile.ZIP_DEFLATED)
    done = load(server, tmp_path / "d.npz")
    assert done.returncode == 0, done.stderr
    assert "1 rows without a next observation are left out" in done.stdout
    found = all_rows(server)
    kept = np.delete(np.arange(ROWS), ENDS[1])
    assert (found["reward"] == kept).all()
    assert (found["next_obs"][:, 0] == np.where(np.isin(kept, ENDS), kept, kept + 1)).all()
    with Observer.connect(server.name, run_dir=server.run_dir) as observer:
        (links,) = [chunk.link.tolist() for chunk in observer.chunks() if chunk.link is not None]
    assert links[ENDS[1] - 1] == -1
    assert links[0] == 1


def test_a_snapshots_file_of_rows_is_read_by_load_and_by_anybody(start_server: Start, tmp_path: Path) -> None:
    first, second = start_server("--capacity", "100", "--slot-rows", "16", "--columns", "priority"), start_server("--slot-rows", "16")
    rows = {field.name: np.ones((30, *field.shape), field.numpy_dtype) * 3 for field in SCHEMA}
    rows = {name: values.astype(SCHEMA[name].numpy_dtype) for name, values in rows.items()}
    with Collector.connect(first.name, schema=SCHEMA, run_dir=first.run_dir) as collector:
        collector.write(rows)
        collector.flush()
    with Observer.connect(first.name, run_dir=first.run_dir) as observer:
        taken = take_snapshot(observer, tmp_path)
    done = load(second, taken.path / "rows-00000.safetensors")
    assert done.returncode == 0, done.stderr
    assert {name: values.tobytes() for name, values in all_rows(second).items()} == {n: v.tobytes() for n, v in rows.items()}


REFUSED: dict[str, tuple[Arrays, str]] = {
    "missing": ({"obs": np.zeros((3, 2), np.float32)}, "it lacks action"),
    "pickled": ({"obs": np.array([{}], object)}, "obs is an array of object"),
    "lengths": ({"obs": np.zeros(3), "action": np.zeros(4), "reward": np.zeros(3)}, "action 4, reward 3"),
    "observations": (minari() | {"observations": np.zeros((ROWS - 1, 3), np.float32)}, "other numbers of rows"),
    "float64": (minari() | {"rewards": np.zeros(ROWS)}, "reward"),
}


def test_what_does_not_fit_is_refused_by_name(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--capacity", "100", "--slot-rows", "16")
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir):
        for name, (arrays, named) in REFUSED.items():
            save(tmp_path / "d.npz", arrays)
            done = load(server, tmp_path / "d.npz")
            assert done.returncode != 0, name
            assert named in done.stderr, done.stderr
    assert report(server)["counters"]["rows_committed"] == 0


def test_a_file_of_another_kind_is_refused_by_name(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--capacity", "100", "--slot-rows", "16")
    for name, content in ("a.npz", b"PK\3\4 no archive"), ("b.safetensors", b"\xff" * 64), ("c.hdf5", b""):
        (tmp_path / name).write_bytes(content)
        done = load(server, tmp_path / name)
        assert done.returncode == 2
        assert name in done.stderr
