"""Somebody removes the files by which a living server is found: those attached notice nothing, and a second later it can be found again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from replay_server_client import Collector
from replay_server_protocol.endpoints import Endpoints
from support.freeze import frozen
from support.markers import MARKERS, marker_steps
from support.raw_client import RawLearner
from support.reports import report_of
from support.servers import ServerProcess

SMALL = ("--capacity", "1000", "--slot-rows", "16")


@pytest.fixture
def run_dir(crash_dir: Path) -> Iterator[Path]:
    """One that the server makes, and takes with it."""
    yield crash_dir / "run"
    assert not (crash_dir / "run").exists()


def remove_sockets(endpoints: Endpoints) -> None:
    endpoints.control_path.unlink()
    endpoints.status_path.unlink()


def remove_directory(endpoints: Endpoints) -> None:
    shutil.rmtree(endpoints.run_dir)


def wait_there(path: Path) -> None:
    end = time.monotonic() + 3.0
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not made again"
        time.sleep(0.01)  # another process's files are no event here


@pytest.mark.parametrize("remove", [remove_sockets, remove_directory])
def test_a_server_whose_files_are_removed_makes_them_again_and_nobody_is_disturbed(
    start_server: Callable[..., ServerProcess], remove: Callable[[Endpoints], None]
) -> None:
    server = start_server(*SMALL)
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector, RawLearner(server.endpoints) as learner:
        remove(server.endpoints)
        collector.write(marker_steps(0, 1, 0, 16))
        assert collector.flush() == 16
        wait_there(server.endpoints.status_path)
        report = report_of(server)
        assert (report["pid"], report["counters"]["sessions_lost"]) == (server.pid, 0)
        with RawLearner(server.endpoints) as newcomer:
            assert newcomer.window(1, "step")[1].tolist() == list(range(16))
        assert learner.window(1, "step")[1].tolist() == list(range(16))
        server.child.wait_for(str(server.endpoints.control_path))
        assert server.run_dir.stat().st_mode & 0o777 == 0o700
        assert server.endpoints.control_path.stat().st_mode & 0o777 == 0o600


def test_two_servers_of_one_name_take_nothing_from_each_other(start_server: Callable[..., ServerProcess]) -> None:
    """The second one could start because the first one's lock was removed."""
    first = start_server(*SMALL)
    with Collector.connect(first.name, schema=MARKERS, run_dir=first.run_dir) as collector:
        collector.write(marker_steps(0, 1, 0, 16))
        with frozen(first.child):  # else it might be the faster one
            remove_directory(first.endpoints)
            second = start_server(*SMALL, name=first.name)
        first.child.wait_for("already serves")
        collector.write(marker_steps(0, 1, 16, 16))
        assert collector.flush() == 32, "who was attached stays with the first"
    assert first.stop() == 0
    assert report_of(second)["pid"] == second.pid
    with Collector.connect(second.name, schema=MARKERS, run_dir=second.run_dir) as collector:
        collector.write(marker_steps(0, 1, 0, 16))
        assert collector.flush() == 16
