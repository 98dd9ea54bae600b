"""Without a GPU ``cuda`` fails at once, with a typed error that says what is missing; ``auto`` goes on with the CPU ring."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_server_client import DeviceError
from support.processes import Children
from support.reports import report_of
from support.servers import ServerProcess

from replay_server import ReplayServer
from replay_server.cuda_runtime import has_nvidia_driver

MISSING = r"cuda-bindings.*replay-server\[cuda\]|no GPU is visible|NVIDIA driver"
"""The package, the GPU or the driver: whichever a machine lacks first."""


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the children of this process; also on a machine that has one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("options", [["--device", "cuda"], ["--device", "cuda:0", "--storage", "host"]])
def test_serving_on_cuda_ends_with_5_and_a_line_that_says_what_is_missing(children: Children, crash_dir: Path, options: list[str]) -> None:
    server = children.start([sys.executable, "-m", "replay_server", "serve", "--run-dir", str(crash_dir), *options])
    assert server.wait() == 5
    (line,) = server.output.splitlines()
    assert line.startswith("replay-server: ")
    assert re.search(MISSING, line), line
    assert list(crash_dir.iterdir()) == []


def test_a_spawned_server_on_cuda_raises_the_same_as_a_device_error(children: Children) -> None:
    with pytest.raises(DeviceError, match=MISSING):
        ReplayServer.spawn(device="cuda")


def refusal_of_cuda(name: str, run_dir: str) -> str:
    from replay_server_client import InvalidRequest, Learner

    try:
        Learner.connect(name, run_dir=run_dir, device="cuda")
    except InvalidRequest as error:
        return str(error)
    return "not refused"


def test_a_learner_on_cuda_is_refused_before_it_attaches(server: ServerProcess, children: Children) -> None:
    assert "device='cpu'" in children.run(refusal_of_cuda, server.name, str(server.run_dir)).result()
    assert report_of(server)["counters"]["sessions_opened"] <= 1, "only this report's own"


def test_auto_serves_from_the_cpu(start_server: Callable[..., ServerProcess]) -> None:
    assert report_of(start_server("--device", "auto", "--capacity", "100"))["device"]["kind"] == "cpu"


@pytest.mark.skipif(has_nvidia_driver(), reason="a driver is loaded here")
def test_without_a_driver_auto_doesnt_tell_to_install_a_package_that_would_not_help(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--device", "auto", "--capacity", "100")
    server.child.wait_for("this machine has no NVIDIA driver; the ring lies in host memory")
    assert "pip install" not in server.child.output


def test_a_driver_is_known_by_its_files(tmp_path: Path) -> None:
    assert not has_nvidia_driver((str(tmp_path / "nvidia"),))
    assert has_nvidia_driver((str(tmp_path / "nvidia"), str(tmp_path)))
