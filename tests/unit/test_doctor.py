"""The doctor's checks on faked machines: each finding has a verdict and, unless all is well, a remedy."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ReplayError, ReplayTimeout
from replay_server_protocol.process import ProcessIdentity
from replay_server_protocol.segment import Segment, segment_name

from replay_server.doctor import child, gpu, leftovers, memory, packages, processes
from replay_server.doctor.examination import CHECKS, as_json, as_lines, examine, has_failures
from replay_server.doctor.finding import Finding, Verdict, failure, ok, skipped, warning
from replay_server.doctor.scene import Gpus, Scene, ToolGpu, pid_behind
from replay_server.run_directory import RingHolder

UUID = "01234567-89ab-cdef-0123-456789abcdef"
ONE_GPU = Gpus(((UUID, "NVIDIA H200"),), 13000, 13000)
LISTED = (ToolGpu(f"GPU-{UUID}", "580.95", "Disabled", "Default"),)
NO_GPU = Gpus(why_none="no GPU is visible")


def scene_of(
    tmp_path: Path,
    device: str = "auto",
    gpus: Gpus = NO_GPU,
    listed: tuple[ToolGpu, ...] | str = "nvidia-smi can't be started",
    **environment: str,
) -> Scene:
    """A machine whose GPUs are known without asking, with an empty /proc."""
    proc = tmp_path / "proc"
    proc.mkdir(exist_ok=True)
    scene = Scene(Endpoints.resolve("named", tmp_path / "run"), device, environment, proc, limit_s=5.0)
    vars(scene).update(gpus=gpus, tool_gpus=listed)
    return scene


def verdict(finding: Finding) -> str:
    assert finding.found
    assert finding.remedy or finding.verdict in (Verdict.OK, Verdict.SKIPPED), "whoever reads a finding wants to know what to do"
    return finding.verdict.value


def test_without_a_gpu_auto_skips_and_cuda_fails(tmp_path: Path) -> None:
    for check in (gpu.driver, gpu.ipc, gpu.mig, gpu.visibility):
        assert verdict(check(scene_of(tmp_path))) == "skipped"
    assert verdict(gpu.driver(scene_of(tmp_path, "cuda"))) == "failure"
    assert verdict(gpu.driver(scene_of(tmp_path, "cpu"))) == "skipped"


def test_a_gpu_that_is_there_is_named_and_one_that_is_asked_for_and_missing_fails(tmp_path: Path) -> None:
    found = gpu.driver(scene_of(tmp_path, "cuda", ONE_GPU, LISTED))
    assert verdict(found) == "ok"
    for words in ("driver 580.95", "CUDA 13.0", "NVIDIA H200", UUID):
        assert words in found.found
    assert verdict(gpu.driver(scene_of(tmp_path, "cuda:1", ONE_GPU, LISTED))) == "failure"


def test_gpus_that_cuda_does_not_show_are_a_failure_that_names_the_variable(tmp_path: Path) -> None:
    hidden = gpu.visibility(scene_of(tmp_path, "auto", NO_GPU, LISTED, CUDA_VISIBLE_DEVICES="7"))
    assert verdict(hidden) == "failure"
    assert "CUDA_VISIBLE_DEVICES='7'" in hidden.found
    assert verdict(gpu.visibility(scene_of(tmp_path, "auto", ONE_GPU, LISTED))) == "ok"
    stranger = (ToolGpu("GPU-other", "580", "Disabled", "Default"),)
    assert verdict(gpu.visibility(scene_of(tmp_path, "auto", ONE_GPU, stranger))) == "warning"


@pytest.mark.parametrize(
    ("mode", "compute", "expected"),
    [("Disabled", "Default", "ok"), ("Enabled", "Default", "warning"), ("Disabled", "Exclusive_Process", "failure")],
)
def test_slices_and_exclusive_modes(tmp_path: Path, mode: str, compute: str, expected: str) -> None:
    assert verdict(gpu.mig(scene_of(tmp_path, "auto", ONE_GPU, (ToolGpu(f"GPU-{UUID}", "580", mode, compute),)))) == expected


def test_wsl_is_known_by_its_kernel(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    assert verdict(gpu.platform(scene)) == "ok"
    (scene.proc / "version").write_text("Linux version 5.15.167.4-microsoft-standard-WSL2")
    assert verdict(gpu.platform(scene)) == "warning"


def test_an_mps_daemon_is_told_from_the_folder_it_left(tmp_path: Path) -> None:
    folder = tmp_path / "mps"
    scene = scene_of(tmp_path, CUDA_MPS_PIPE_DIRECTORY=str(folder))
    assert "none" in gpu.mps(scene).found
    folder.mkdir()
    assert verdict(gpu.mps(scene)) == "warning"
    os.mkfifo(folder / "control")
    assert verdict(gpu.mps(scene)) == "warning"
    reader = os.open(folder / "control", os.O_RDONLY | os.O_NONBLOCK)
    assert "daemon answers" in gpu.mps(scene).found
    os.close(reader)


def test_expandable_segments_are_named_and_harmless(tmp_path: Path) -> None:
    found = gpu.allocator(scene_of(tmp_path, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"))
    assert (verdict(found), "not touched" in found.found) == ("ok", True)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([{"uuid": UUID, "name": "H200", "handle": "00", "pattern": "ab"}, {"pattern": "ab"}], "ok"),
        ([{"uuid": UUID, "name": "H200", "handle": "00", "pattern": "ab"}, {"pattern": "00"}], "failure"),
        ([{"uuid": UUID, "name": "H200", "handle": "00", "pattern": "ab"}], "failure"),
        ([], "failure"),
    ],
)
def test_ipc_is_proved_by_the_bytes_a_second_process_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any]], expected: str
) -> None:
    lines = [["echo", json.dumps(answer)] for answer in answers] + [["sh", "-c", "echo cudaIpcOpenMemHandle answered 201; exit 1"]]
    monkeypatch.setattr(gpu, "python", lambda *_: lines.pop(0))
    assert verdict(gpu.ipc(scene_of(tmp_path, "cuda", ONE_GPU))) == expected


def test_a_child_that_hangs_is_killed_with_what_it_started_and_one_that_fails_is_quoted(tmp_path: Path) -> None:
    beacon = tmp_path / "beacon"
    os.mkfifo(beacon)
    with pytest.raises(ReplayTimeout, match=r"within 0\.3 s"):
        child.output_of(["sh", "-c", f"sleep 100 > {beacon} & cat {beacon}; wait"], 0.3)
    end = time.monotonic() + 5  # what was killed with the child is gone a moment after it
    with pytest.raises(OSError, match="No such device"):  # nobody holds its other end any more
        while time.monotonic() < end:
            os.close(os.open(beacon, os.O_WRONLY | os.O_NONBLOCK))
    with pytest.raises(ReplayError, match="what went wrong"):
        child.output_of(["sh", "-c", "echo what went wrong; exit 3"], 5)
    with pytest.raises(ReplayError, match="nowhere"):
        child.output_of(["nowhere-to-be-found"], 5)


def test_a_check_that_hangs_or_breaks_is_a_failure_and_the_rest_goes_on(tmp_path: Path) -> None:
    scene = Scene(Endpoints.resolve("named", tmp_path), "cpu", {}, limit_s=0.05)
    over = threading.Event()

    def hangs(_: Scene) -> Finding:
        over.wait(30)
        return ok("too late")

    def breaks(_: Scene) -> Finding:
        raise OSError("the disk is on fire")

    found = examine(scene, {"hangs": hangs, "breaks": breaks, "works": lambda _: ok("well")})
    over.set()
    assert [verdict(finding) for finding in found.values()] == ["failure", "failure", "ok"]
    assert "not done within" in found["hangs"].found
    assert "on fire" in found["breaks"].found


FINDINGS: Mapping[str, Finding] = {"one": ok("well"), "another one": warning("slow", "hurry"), "third": skipped("no GPU")}


def test_lines_are_aligned_and_remedies_stand_below(tmp_path: Path) -> None:
    lines = as_lines(FINDINGS)
    assert lines == [
        "ok       one          well",
        "warning  another one  slow",
        "                      to do: hurry",
        "skipped  third        no GPU",
        "1 ok, 1 warning, 0 failure, 1 skipped",
    ]
    assert not has_failures(FINDINGS)
    assert has_failures({**FINDINGS, "fourth": failure("gone", "bring it back")})


def test_the_json_report_is_versioned_and_holds_every_finding(tmp_path: Path) -> None:
    found = json.loads(json.dumps(as_json(scene_of(tmp_path), FINDINGS)))
    assert found["report_version"] == 1
    assert found["has_failures"] is False
    assert found["findings"] == [{"name": name, **asdict(finding)} for name, finding in FINDINGS.items()]


def test_the_page_explains_every_check_in_its_order() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8").partition("## The checks")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([^|]+?) \|", page, re.MULTILINE)[1:] == list(CHECKS)


# memory, processes


def test_a_dev_shm_below_the_reserve_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 100, 100, 100, 0, 255))  # 64 MiB
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    found = memory.shared_memory(scene_of(tmp_path))
    assert verdict(found) == "failure"
    assert "--shm-size" in found.remedy


def test_a_dev_shm_that_is_a_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "segment_dir", lambda: tmp_path)
    scene = scene_of(tmp_path)
    (scene.proc / "mounts").write_text(f"tmpfs / tmpfs rw 0 0\n/dev/sda1 {tmp_path} ext4 rw 0 0\n")
    assert "ext4" in memory.shared_memory(scene).found


def test_memory_that_can_not_be_locked_is_a_warning_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, expected in (({"why_not": None}, "ok"), ({"why_not": "cudaHostRegister answered 2"}, "warning")):
        monkeypatch.setattr(memory, "python", lambda *_, answer=answer: ["echo", json.dumps(answer)])
        assert verdict(memory.locked_memory(scene_of(tmp_path, "cuda", ONE_GPU))) == expected
    assert verdict(memory.locked_memory(scene_of(tmp_path))) == "ok"


@pytest.mark.parametrize(("limit", "expected"), [(1 << 20, "ok"), (256, "warning"), (64, "failure")])
def test_open_files_are_told_in_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, expected: str) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, limit))
    assert verdict(processes.descriptors(scene_of(tmp_path))) == expected


def test_a_clock_that_differs_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(processes.clock(scene_of(tmp_path))) in ("ok", "warning")
    line = json.dumps({"monotonic_ns": 1, "time_namespace": 0})
    monkeypatch.setattr(processes, "python", lambda *_: ["sh", "-c", f"while read -r _; do echo '{line}'; done"])
    assert verdict(processes.clock(scene_of(tmp_path))) == "failure"


def test_a_quota_below_the_processors_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay_server.cgroup.processors", lambda: 0.5)
    assert verdict(processes.processors(scene_of(tmp_path))) == "warning"


# what dead servers left


def listening(path: Path) -> socket.socket:
    path.parent.mkdir(exist_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


def test_the_process_behind_a_socket(tmp_path: Path) -> None:
    assert pid_behind(tmp_path / "none") is None
    with listening(tmp_path / "socket"):
        assert pid_behind(tmp_path / "socket") == os.getpid()
    assert pid_behind(tmp_path / "socket") is None, "its file stays behind"


def test_names_of_dead_servers_are_told_with_how_to_remove_them(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    run_dir = scene.endpoints.run_dir
    with listening(run_dir / "alive.control"):
        (run_dir / "alive.lock").touch()
        assert "dead" not in leftovers.leftovers(scene).remedy
        (run_dir / "gone.lock").touch()
        found = leftovers.leftovers(scene)
    assert verdict(found) == "warning"
    assert f"gone in {run_dir}" in found.found
    assert f"rm {run_dir}/gone.*" in found.remedy
    assert "alive" not in found.found


def test_segments_of_living_runs_are_left_alone_and_dead_ones_are_told(tmp_path: Path) -> None:
    scene = Scene(Endpoints.resolve("named", tmp_path / "run"), "cpu", {})
    run, known = f"{os.getpid():08x}a", f"{os.getpid():08x}b"
    mapped, stranger = Segment.create(segment_name(run, "ring"), 4096), Segment.create(segment_name(known, "mail1"), 4096)
    stranger.close()
    try:
        found = leftovers.segments(scene)
        assert f"replay-{run}" not in found.found, "it is mapped"
        assert f"replay-{known}" in found.found
        assert f"replay-{known}-*" in found.remedy
        with listening(scene.endpoints.control_path):
            scene.endpoints.lock_path.write_text(json.dumps({"run_id": known}))
            assert f"replay-{known}" not in leftovers.segments(scene).found, "a living server knows it"
        mapped.close()
        assert f"replay-{run}" in leftovers.segments(scene).found
    finally:
        mapped.unlink()
        stranger.unlink()


def test_a_learner_that_holds_a_dead_servers_ring_is_named(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    scene.endpoints.run_dir.mkdir()
    assert verdict(leftovers.holders(scene)) == "ok"
    me = ProcessIdentity.current()
    scene.endpoints.learners_path.write_text(json.dumps([asdict(RingHolder(me.pid, me.start_ticks, "trainer", 1))]))
    found = leftovers.holders(scene)
    assert (verdict(found), f"trainer (pid {me.pid})" in found.found) == ("warning", True)


def test_a_run_directory_is_private_ours_and_writable(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    run_dir = scene.endpoints.run_dir
    assert "not there yet" in leftovers.run_directory(scene).found
    assert not run_dir.exists(), "looking makes nothing"
    run_dir.mkdir(mode=0o700)
    assert verdict(leftovers.run_directory(scene)) == "ok"
    assert list(run_dir.iterdir()) == []
    run_dir.chmod(0o755)
    found = leftovers.run_directory(scene)
    assert (verdict(found), found.remedy) == ("failure", f"chmod 700 {run_dir}")
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o755
    run_dir.rmdir()
    run_dir.touch()
    assert verdict(leftovers.run_directory(scene)) == "failure"


# packages


@pytest.mark.parametrize(
    ("version", "limits", "is_met"),
    [
        ("2.13.0+cpu", ">=2.8", True),
        ("2.7.1", ">=2.8", False),
        ("13.0.3", ">=13.0.3,<14", True),
        ("14.0", ">=13.0.3,<14", False),
        ("26", ">=26.0.0", True),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, limits: str, is_met: bool) -> None:
    assert packages.fits(version, limits) is is_met


def test_missing_and_old_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"numpy": "1.20", "torch": "2.9+cu130"}
    needed = [
        "numpy>=1.26",
        "torch>=2.8",
        'cuda-bindings<14,>=13.0.3; platform_system == "Linux" and extra == "cuda"',
        'ruff; extra == "dev"',
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: needed)
    monkeypatch.setattr(packages, "_version_of", installed.get)
    old = packages.packages(scene_of(tmp_path))
    assert (verdict(old), old.remedy) == ("failure", "pip install 'numpy>=1.26'")
    installed["numpy"] = "2.0"
    assert verdict(packages.packages(scene_of(tmp_path))) == "ok"
    assert "cuda-bindings" in packages.packages(scene_of(tmp_path, "cuda")).found
    del installed["torch"]
    assert verdict(packages.packages(scene_of(tmp_path))) == "warning"


def test_a_torch_without_cuda_beside_a_gpu_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_version_of", {"torch": "2.9+cpu"}.get)
    assert verdict(packages.torch_build(scene_of(tmp_path, "auto", ONE_GPU))) == "warning"
    assert verdict(packages.torch_build(scene_of(tmp_path))) == "ok"
