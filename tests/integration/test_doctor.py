"""The doctor as a command, on this machine and in places of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import Children
from support.servers import ServerProcess, spawn_server

DOCTOR = [sys.executable, "-m", "replay_server", "doctor"]


def run(*arguments: str, within: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*within, *DOCTOR, *arguments], capture_output=True, text=True, timeout=60, check=False)


def findings(*arguments: str, within: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    ended = run(*arguments, "--json", within=within)
    assert ended.stderr == ""
    report = json.loads(ended.stdout)
    assert report["report_version"] == 1
    assert ended.returncode == (8 if report["has_failures"] else 0)
    assert report["has_failures"] == any(found["verdict"] == "failure" for found in report["findings"])
    return {found["name"]: found for found in report["findings"]}


def is_allowed(*command: str) -> bool:
    return subprocess.run([*command, "true"], capture_output=True, check=False, timeout=10).returncode == 0


def test_this_machine_can_serve_from_the_cpu_and_the_text_says_what_the_json_says(crash_dir: Path) -> None:
    found = findings("--device", "cpu", "--run-dir", str(crash_dir))
    assert found["shared clock"]["verdict"] in ("ok", "warning")
    assert found["deaths"]["verdict"] == "ok"
    assert found["CUDA IPC"]["verdict"] == "skipped"
    text = run("--device", "cpu", "--run-dir", str(crash_dir))
    for name, finding in found.items():
        assert any(line.startswith(finding["verdict"]) and name in line for line in text.stdout.splitlines()), name
    assert list(crash_dir.iterdir()) == [], "looking leaves nothing"


def test_help_tells_the_exit_code_and_wrong_options_end_with_2(crash_dir: Path) -> None:
    assert "8 the doctor found a failure" in run("--help").stdout
    assert run("--device", "tpu").returncode == 2
    assert run("--name", "../up").returncode == 2


def test_a_gpu_that_is_asked_for_and_missing_is_a_failure(crash_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = findings("--device", "cuda", "--run-dir", str(crash_dir))
    assert found["driver"]["verdict"] == "failure"
    assert found["driver"]["remedy"]


def test_a_living_server_is_seen_and_left_alone(server: ServerProcess) -> None:
    found = findings("--device", "cpu", "--name", server.name, "--run-dir", str(server.run_dir))
    assert server.name not in found["dead servers"]["found"]
    assert found["ring holders"]["found"] == "the server is alive"
    assert server.child.is_alive()


def test_what_a_killed_server_leaves_is_named_with_its_remedy(children: Children, crash_dir: Path) -> None:
    server = spawn_server(children, crash_dir, "--capacity", "100")
    server.kill()
    found = findings("--device", "cpu", "--run-dir", str(crash_dir))["dead servers"]
    assert found["verdict"] == "warning"
    assert server.name in found["found"]
    subprocess.run(["sh", "-c", found["remedy"].partition("is just starting: ")[2]], check=True)
    assert list(crash_dir.iterdir()) == []


@pytest.mark.skipif(not is_allowed("unshare", "-T", "--monotonic", "9", "--fork"), reason="unshare -T (a time namespace) is not allowed")
def test_a_server_in_another_time_namespace_is_a_failure(server: ServerProcess) -> None:
    place = ("--device", "cpu", "--name", server.name, "--run-dir", str(server.run_dir))
    found = findings(*place, within=("unshare", "-T", "--monotonic", "9", "--fork"))["shared clock"]
    assert found["verdict"] == "failure"
    assert f"pid {server.pid}" in found["found"]


@pytest.mark.skipif(not is_allowed("unshare", "--pid", "--fork", "--mount-proc"), reason="unshare --pid is not allowed")
def test_a_server_in_another_pid_namespace_is_a_warning(server: ServerProcess) -> None:
    place = ("--device", "cpu", "--name", server.name, "--run-dir", str(server.run_dir))
    found = findings(*place, within=("unshare", "--pid", "--fork", "--mount-proc"))
    assert "the server lives in another PID namespace" in found["PID namespace"]["found"]
    assert server.name not in found["dead servers"]["found"], "one that can't be seen is not dead"


@pytest.mark.skipif(not is_allowed("unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm", "sh"), reason="unshare -m is not allowed")
def test_dockers_default_dev_shm_is_a_failure(crash_dir: Path) -> None:
    small = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
    found = findings("--device", "cpu", "--run-dir", str(crash_dir), within=small)["shared memory"]
    assert found["verdict"] == "failure"
    assert "--shm-size" in found["remedy"]
