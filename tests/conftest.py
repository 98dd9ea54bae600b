"""Fixtures of every test: a short run directory, real children, a real server, and the leak check around all three."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from support.leaks import nothing_left
from support.processes import Child, Children
from support.reaper import Reaper
from support.servers import ServerProcess, spawn_server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, action="append", default=[], help="play this fault schedule alone (tests/fault/test_schedules.py)")


def pytest_configure(config: pytest.Config) -> None:
    """No time limit per example: on a busy machine it would measure the neighbours. The marker is known also without its plugin.

    A shell without job control starts what it puts into the background with Ctrl-C ignored, and so would every child of the tests be.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "timeout: seconds this test may take, where pytest-timeout is installed")
    hypothesis.settings.register_profile("replay", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.load_profile("replay")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """After deselection: torch is only imported when a test marked ``gpu`` is really about to run."""
    if not os.environ.get("REPLAY_TEST_ALL"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow; scripts/test --all"))
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu() if needs_gpu else None
    if reason:
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu() -> str | None:
    """Why tests marked ``gpu`` can't run here, or None."""
    import torch

    if torch.cuda.is_available():
        return None
    return f"needs a CUDA device; torch {torch.__version__} sees none"


@pytest.fixture(scope="session", autouse=True)
def _reaper() -> Iterator[None]:
    """A run that is killed leaves no server behind."""
    Child.reaper = Reaper()
    yield
    Child.reaper.close()
    Child.reaper = None


@pytest.fixture
def crash_dir() -> Iterator[Path]:
    """A run directory with a path short enough for sockets, for tests whose servers are killed; removed with all it holds."""
    path = Path(tempfile.mkdtemp(prefix="rs-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def run_dir(crash_dir: Path) -> Iterator[Path]:
    """As ``crash_dir``, for servers that stop in good order: nothing may be left in it."""
    yield crash_dir
    left = sorted(path.name for path in crash_dir.iterdir())
    assert not left, f"left in the run directory: {', '.join(left)}"


@pytest.fixture
def children() -> Iterator[Children]:
    """Starts child processes; none may outlive the test, nor leave a descriptor or segment behind."""
    with nothing_left(), Children() as started:
        yield started


@pytest.fixture
def start_server(run_dir: Path, children: Children) -> Iterator[Callable[..., ServerProcess]]:
    """``start_server("--capacity", "1000")``: a server in ``run_dir``, stopped in good order at the end of the test."""
    servers: list[ServerProcess] = []

    def start(*options: str, name: str | None = None) -> ServerProcess:
        servers.append(spawn_server(children, run_dir, *options, name=name))
        return servers[-1]

    yield start
    statuses = {server.name: server.stop() for server in servers}
    failed = {server.name: server.child.output for server in servers if statuses[server.name] != 0}
    assert not failed, f"servers did not end with 0: {statuses}\n{failed}"


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    """A small server on the CPU ring: 1,000 rows, slots of 16."""
    return start_server("--capacity", "1000", "--slot-rows", "16")
