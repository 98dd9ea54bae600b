"""A trace switched on and off while a server and its clients run: `replay-server trace start` and `trace stop FILE`."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from replay_server_client import Collector, Learner, Trace
from replay_server_client.admin import Admin
from replay_server_protocol.errors import DiskFull, InvalidRequest
from replay_server_protocol.trace import Event, load
from support.markers import MARKERS, marker_steps
from support.processes import Children
from support.raw_client import RawClient
from support.reports import report_of, wait_report
from support.servers import ServerProcess, spawn_server

LANES = 4
RING = ("--capacity", "64", "--slot-rows", "16")


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    return start_server(*RING)


@pytest.fixture
def admin(server: ServerProcess) -> Iterator[Admin]:
    with Admin.connect(server.name, run_dir=server.run_dir) as admin:
        yield admin


def collector_of(server: ServerProcess, **options: Any) -> Collector:
    return Collector.connect(server.name, schema=MARKERS, lanes=LANES, run_dir=server.run_dir, name="walker", **options)


def learner_of(server: ServerProcess, **options: Any) -> Learner:
    return Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=0, **options)


def run_slots(collector: Collector, learner: Learner, first: int, slots: int = 3) -> None:
    for slot in range(first, first + slots):
        collector.write(marker_steps(0, LANES, 4 * slot, 4))
        learner.sample(8, min_committed=16 * (slot + 1))
        with learner.span("update", tick=slot):
            pass


def names_of(events: list[Event]) -> dict[str, int]:
    names = [event["name"] for event in events if event["ph"] == "X"]
    return {name: names.count(name) for name in names}


def parts_of(server: ServerProcess) -> list[str]:
    return [path.name for path in server.run_dir.iterdir() if ".trace-" in path.name]


def command(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    where = ["--name", server.name, "--run-dir", str(server.run_dir)]
    line = [sys.executable, "-m", "replay_server", "trace", *arguments, *where]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def test_what_happens_between_start_and_stop_is_in_the_file_and_nothing_else(server: ServerProcess, admin: Admin, tmp_path: Path) -> None:
    with collector_of(server) as collector, learner_of(server) as learner:
        run_slots(collector, learner, 0)
        admin.trace_start()
        assert report_of(server)["trace"]["state"] == "on"
        run_slots(collector, learner, 3)
        collector.flush()  # a collector answers at its next call; its word to record came with this one's messages at the latest
        run_slots(collector, learner, 6)
        found = stop_while(collector, learner, server, tmp_path / "all.json")
        assert report_of(server)["trace"]["state"] == "off"
        run_slots(collector, learner, 9)
    events = load(tmp_path / "all.json")
    told = names_of(events)
    assert told["commit"] == told["drain"] == told["copy"] == 6
    assert 5 <= told["boundary"] <= 7
    assert told["update"] in (5, 6)
    assert 4 <= told["write"] <= 6
    assert {event["args"]["name"].split(" (")[0] for event in events if event["name"] == "process_name"} == {
        f"replay-server {server.name}",
        "collector walker",
        "learner learner",
    }
    assert len({event["pid"] for event in events}) == 3, "two clients of one process stay apart"
    spans = [event for event in events if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) - min(e["ts"] for e in spans) < 60e6, "one clock"
    assert "left out" not in found
    assert parts_of(server) == []


def stop_while(collector: Collector, learner: Learner, server: ServerProcess, path: Path) -> str:
    """`trace stop` from another process, while the clients go on calling."""
    line = [sys.executable, "-m", "replay_server", "trace", "stop", str(path), "--name", server.name, "--run-dir", str(server.run_dir)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as stopping:
        while True:
            try:
                printed, _ = stopping.communicate(timeout=0.05)
                break
            except subprocess.TimeoutExpired:
                collector.flush()
                learner.progress()
    assert stopping.returncode == 0, printed
    return printed


def test_a_collector_that_makes_no_call_is_named_and_left_out_and_what_it_writes_later_is_removed(
    server: ServerProcess, admin: Admin, tmp_path: Path
) -> None:
    with collector_of(server) as collector, learner_of(server) as learner:
        run_slots(collector, learner, 0)
        admin.trace_start()
        collector.write(marker_steps(0, LANES, 12, 4))
        collector.flush()
        found = admin.trace_stop(tmp_path / "all.json", wait=0.3)
        (missing,) = (traced for traced in found if traced.left_out)
        assert missing.process == "collector walker"
        assert "no answer within 0.3 s: it answers at its next call" in missing.left_out
        assert {traced.process.split()[0] for traced in found if not traced.left_out} == {"replay-server", "learner"}
        collector.flush()  # hands in, too late
        wait_report(server, lambda report: not parts_of(server))
        admin.trace_start()  # and the next trace has it again
    told = json.loads((tmp_path / "all.json").read_text())["otherData"]["processes"]
    assert [process["process"] for process in told if "left_out" in process] == ["collector walker"]


def test_a_client_that_ends_while_a_trace_is_on_hands_in_first_and_one_that_comes_later_is_told(
    server: ServerProcess, admin: Admin, tmp_path: Path
) -> None:
    admin.trace_start()
    with collector_of(server) as collector, learner_of(server) as learner:
        run_slots(collector, learner, 0)
    found = admin.trace_stop(tmp_path / "all.json", wait=5)
    assert all(traced.spans and not traced.left_out for traced in found)
    told = names_of(load(tmp_path / "all.json"))
    assert told["write"] == told["boundary"] == told["update"] == 3


@pytest.mark.parametrize("role", ["learner", "observer"])
def test_a_client_that_attaches_while_a_trace_is_on_records_from_its_first_call(
    server: ServerProcess, admin: Admin, role: Literal["learner", "observer"]
) -> None:
    with RawClient(server.endpoints, role) as before:
        assert before.connection.trace is None
    admin.trace_start()
    with RawClient(server.endpoints, role) as client:  # has read nothing but the answer to its HELLO
        assert client.connection.trace is not None


def test_start_twice_and_stop_without_start_are_refused_and_the_trace_goes_on(server: ServerProcess, tmp_path: Path) -> None:
    never = command(server, "stop", str(tmp_path / "none.json"))
    assert (never.returncode, "no trace is on" in never.stderr) == (2, True)
    assert command(server, "start").returncode == 0
    again = command(server, "start")
    assert (again.returncode, "a trace has been on for" in again.stderr) == (2, True)
    nowhere = command(server, "stop", str(tmp_path / "missing" / "all.json"))
    assert (nowhere.returncode, "name a file in a folder that is yours" in nowhere.stderr) == (2, True)
    assert report_of(server)["trace"]["state"] == "on"
    endless = command(server, "stop", str(tmp_path / "all.json"), "--wait", "1e9")
    assert (endless.returncode, "0 to 600 seconds" in endless.stderr) == (2, True)
    stopped = command(server, "stop", str(tmp_path / "all.json"))
    assert (stopped.returncode, "1 processes" in stopped.stdout) == (0, True), stopped.stderr


def test_a_users_own_trace_keeps_all_and_hands_in_what_the_operator_asked_for(server: ServerProcess, admin: Admin, tmp_path: Path) -> None:
    own = Trace("mine")
    with collector_of(server) as collector, learner_of(server, trace=own) as learner:
        run_slots(collector, learner, 0)
        admin.trace_start()
        learner.progress()
        run_slots(collector, learner, 3)
        before = own.size
    assert before >= 12
    (traced,) = (t for t in admin.trace_stop(tmp_path / "all.json") if t.process == "learner learner")
    assert 0 < traced.spans <= own.size - 6
    assert own.size >= before


def test_a_dead_client_is_named(server: ServerProcess, admin: Admin, children: Children, tmp_path: Path) -> None:
    admin.trace_start()
    source = f"""
import time
from replay_server_client import Collector, Schema
collector = Collector.connect({server.name!r}, schema=Schema.of(step="int64"), run_dir={str(server.run_dir)!r}, name="short")
print("attached", flush=True)
time.sleep(60)
"""
    child = children.start([sys.executable, "-c", source], name="collector")
    child.wait_for("attached")
    child.send_signal(signal.SIGKILL)
    wait_report(server, lambda report: not report["collectors"])
    (missing,) = (t for t in admin.trace_stop(tmp_path / "all.json") if t.left_out)
    assert (missing.process, missing.pid) == ("collector short", child.pid)
    assert "before it could hand in" in missing.left_out


def test_a_full_disk_costs_the_trace_alone(server: ServerProcess, admin: Admin, full_folder: Path) -> None:
    earlier = full_folder / "all.json"
    earlier.write_text("{}")
    with collector_of(server) as collector, learner_of(server) as learner:
        admin.trace_start()
        run_slots(collector, learner, 0)
        (full_folder / "filled").write_bytes(bytes(room_of(full_folder)))
        learner.close()
        with pytest.raises(DiskFull, match=r"all\.json' was not written: No space left on device"):
            admin.trace_stop(earlier, wait=0.1)
        assert earlier.read_text() == "{}"
        assert sorted(path.name for path in full_folder.iterdir()) == ["all.json", "filled"]
        collector.write(marker_steps(0, LANES, 12, 4))
        assert collector.flush() == 64, "the server goes on"
    with pytest.raises(InvalidRequest, match="no trace is on"):
        admin.trace_stop(earlier)


def test_a_full_run_directory_is_told_by_each_that_can_not_hand_in(children: Children, full_folder: Path, tmp_path: Path) -> None:
    run_dir = full_folder / "run"
    server = spawn_server(children, run_dir, *RING)
    with Admin.connect(server.name, run_dir=run_dir) as admin:
        with collector_of(server) as collector, learner_of(server) as learner:
            admin.trace_start()
            run_slots(collector, learner, 0)
            (full_folder / "filled").write_bytes(bytes(room_of(full_folder)))
        found = admin.trace_stop(tmp_path / "all.json")
        assert len(found) == 3
        assert all("No space left on device" in traced.left_out for traced in found)
        assert parts_of(server) == []
        assert server.child.is_alive()
    server.stop()


def test_a_server_that_ends_with_a_trace_on_says_so_and_leaves_no_part(server: ServerProcess, admin: Admin) -> None:
    admin.trace_start()
    with collector_of(server) as collector:
        collector.write(marker_steps(0, LANES, 0, 4))
    assert len(parts_of(server)) == 1
    admin.close()
    server.stop()
    assert "a trace was on, and nobody took it" in server.child.output
    assert not server.run_dir.exists() or parts_of(server) == []


@pytest.fixture
def full_folder() -> Iterator[Path]:
    """A file system of 256 KiB of its own."""
    folder = Path(tempfile.mkdtemp(prefix="rs-", dir="/tmp"))
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, check=False).returncode:
        folder.rmdir()
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def room_of(folder: Path) -> int:
    return shutil.disk_usage(folder).free
