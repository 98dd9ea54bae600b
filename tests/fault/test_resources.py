"""Something the machine gives runs out: a typed error before any harm, and whoever has what it needs goes on."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from replay_server_client import AttachRefused, BudgetExceeded, Collector, Schema
from support.markers import MARKERS, marker_steps
from support.processes import Child, Children
from support.rarely import rarely
from support.raw_client import RawClient, RawCollector, RawLearner
from support.reports import assert_conserved, report_of
from support.servers import ServerProcess, spawn_server

SMALL = ("--capacity", "1000", "--slot-rows", "16")
Start = Callable[..., ServerProcess]


def shell(setting: str) -> list[str]:
    """A command that sets something up and becomes the one behind it."""
    return ["sh", "-c", f'{setting} && exec "$@"', "sh"]


def mounted(folder: Path | str, options: str) -> list[str]:
    """Runs a command with a small file system of its own at ``folder``."""
    return ["unshare", "-m", *shell(f"mount -t tmpfs -o {options} tmpfs {folder}")]


def works(*command: str) -> bool:
    return subprocess.run([*command, "true"], capture_output=True, check=False, timeout=10).returncode == 0


needs_mounts = pytest.mark.skipif(not works(*mounted("/dev/shm", "size=1m")), reason="unshare -m with a mount of our own is not allowed")
needs_time_namespaces = pytest.mark.skipif(
    not works("unshare", "-T", "--monotonic", "1", "--fork"), reason="unshare -T (a time namespace) is not allowed"
)


@pytest.fixture
def serve_within(run_dir: Path, children: Children) -> Iterator[Start]:
    """``serve_within(shell(...), "--capacity", "10")``: a server in a place of its own, stopped in good order at the end."""
    servers: list[ServerProcess] = []

    def start(within: list[str], *options: str) -> ServerProcess:
        servers.append(spawn_server(children, run_dir, *options, within=within))
        return servers[-1]

    yield start
    for server in servers:
        assert server.stop() == 0, server.child.output


def refused_start(children: Children, within: list[str], run_dir: Path, *options: str) -> tuple[int, str]:
    """Exit status and last line of a server that can't start; a traceback is none of them."""
    serve = [sys.executable, "-m", "replay_server", "serve", "--device", "cpu", "--run-dir", str(run_dir), *options]
    child = children.start([*within, *serve], name="refused server")
    status = child.wait()
    assert "Traceback" not in child.output, child.output
    return status, child.output.splitlines()[-1]


def assert_serves(server: ServerProcess, steps: int = 32) -> None:
    """Rows go in, and come out as they were."""
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector, RawLearner(server.endpoints) as learner:
        collector.write(marker_steps(1, 1, 0, steps))
        committed = collector.flush()
        _, found = learner.window(1, "step", min_committed=committed)
        assert found[-steps:].tolist() == list(range(steps))
    assert_conserved(report_of(server))


# /dev/shm


@needs_mounts
def test_a_server_whose_ring_does_not_fit_dev_shm_ends_with_4_and_says_what_to_enlarge(
    children: Children, run_dir: Path, tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(MARKERS.to_wire()))
    status, line = refused_start(children, mounted("/dev/shm", "size=8m"), run_dir, "--schema", str(schema), "--capacity", "1000")
    assert status == 4
    assert "/dev/shm" in line


def in_a_small_dev_shm(run_dir: str) -> list[str]:
    """The story of one machine whose /dev/shm has 80 MiB: a collector fits, then nothing more does."""
    import os

    import numpy as np
    from replay_server_client import BudgetExceeded, Collector, Learner
    from support.markers import MARKERS, marker_steps

    from replay_server import ReplayServer

    story = []
    with (
        ReplayServer.spawn(run_dir=run_dir, device="cpu", capacity=1000, slot_rows=16) as server,
        Collector.connect(schema=MARKERS, name="first") as first,
        Learner.connect(device="cpu", prefetch=0) as learner,
    ):
        first.write(marker_steps(1, 1, 0, 32))
        story.append(f"committed {first.flush()}")
        room = os.statvfs("/dev/shm")
        with open("/dev/shm/stranger", "wb") as stranger:
            os.posix_fallocate(stranger.fileno(), 0, room.f_bavail * room.f_frsize)
        try:
            Collector.connect(schema=MARKERS, name="second")
        except BudgetExceeded as error:
            story.append(f"second refused: {'/dev/shm' in str(error)}")
        try:
            learner.post("policy", {"w": np.zeros(1 << 20, np.uint8)})
        except BudgetExceeded as error:
            story.append(f"post refused: {'/dev/shm' in str(error)}")
        first.write(marker_steps(1, 1, 32, 32))
        story.append(f"committed {first.flush()}, sampled {len(learner.sample(8).seqs)}")
        os.unlink("/dev/shm/stranger")
        with Collector.connect(schema=MARKERS, name="second") as second:
            second.write(marker_steps(2, 1, 0, 16))
            story.append(f"committed {second.flush()}")
        story.append(server.status()["phase"])
    return story


@needs_mounts
def test_a_full_dev_shm_refuses_what_is_new_and_leaves_the_old_in_peace(children: Children, run_dir: Path) -> None:
    story = run_within(children, mounted("/dev/shm", "size=80m"), in_a_small_dev_shm, str(run_dir)).result()
    assert story == ["committed 32", "second refused: True", "post refused: True", "committed 64, sampled 8", "committed 80", "serving"]


def run_within(children: Children, within: list[str], function: Callable[..., object], *arguments: object) -> Child:
    """``Children.run`` in a place of its own."""
    child_of = children.start

    def start(command: Any, **options: Any) -> Child:
        return child_of([*within, *command], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "start", start)
        return children.run(function, *arguments)


def test_a_limit_on_the_size_of_files_is_told_to_the_collector_and_the_server_serves_on(serve_within: Start) -> None:
    server = serve_within(shell("ulimit -f 2000"), "--capacity", "10000", "--slot-rows", "16")
    with pytest.raises(BudgetExceeded, match=r"File too large; see the limits of this process"):
        Collector.connect(server.name, schema=Schema.of(wide=("float32", 1000)), run_dir=server.run_dir)
    assert_serves(server, steps=16)


# locked memory, descriptors


def test_without_any_memory_to_lock_a_ring_in_host_memory_serves_as_ever(serve_within: Start) -> None:
    assert_serves(serve_within(shell("ulimit -l 0"), *SMALL))


def test_a_server_out_of_descriptors_refuses_the_next_client_by_name_and_serves_those_it_has(serve_within: Start) -> None:
    server = serve_within(shell("ulimit -n 90"), *SMALL)
    with contextlib.ExitStack() as attached:
        collectors: list[RawCollector] = []
        with pytest.raises(AttachRefused, match=r"files open and may have 90.*ulimit -n"):
            while len(collectors) < 40:
                collectors.append(attached.enter_context(RawCollector(server.endpoints, MARKERS, name=f"c{len(collectors)}")))
        assert len(collectors) >= 2
        for number in (1, 2):
            for collector in collectors:
                collector.publish(number, number - 1, 16)
                collector.wait_credit(number)
        assert len(report_of(server)["collectors"]) == len(collectors)
        collectors[0].close()
        attached.enter_context(RawCollector(server.endpoints, MARKERS, name="next"))
        with RawClient(server.endpoints, "admin"):
            pass  # who comes to stop it still gets in
    assert_conserved(report_of(server))


def test_a_server_that_may_open_too_few_files_ends_with_2_before_it_claims_anything(children: Children, run_dir: Path) -> None:
    status, line = refused_start(children, shell("ulimit -n 30"), run_dir)
    assert status == 2
    assert "ulimit -n" in line
    assert "may open 30 files" in line


def test_a_server_raises_its_own_limit_so_that_silent_connections_do_not_end_it(serve_within: Start) -> None:
    server = serve_within(shell("ulimit -Sn 90"), *SMALL)
    with RawCollector(server.endpoints, MARKERS) as collector, contextlib.ExitStack() as silent:
        for _ in range(200):
            connection = silent.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(str(server.endpoints.control_path))
        collector.publish(1, 0, 16)
        assert collector.wait_credit(1).committed == 16
        assert_serves(server)


def test_silent_connections_that_use_up_every_descriptor_keep_out_newcomers_alone(serve_within: Start) -> None:
    server = serve_within(shell("ulimit -n 768"), *SMALL)
    with RawCollector(server.endpoints, MARKERS) as collector, contextlib.ExitStack() as silent:
        for number in range(1, 46):  # at a pace that the server's loop keeps up with, however busy the machine is
            for _ in range(20):
                connection = silent.enter_context(socket.socket(socket.AF_UNIX))
                connection.connect(str(server.endpoints.control_path))
            collector.publish(number, number % 2, 16)
            assert collector.wait_credit(number).committed == 16 * number
        server.child.wait_for("nobody new is let in")
        silent.close()
        assert_serves(server)
        assert report_of(server)["counters"]["connections_refused"] > 100


def steps_committed_with_many_files_open(name: str, run_dir: str, files: int) -> int:
    import os
    import resource

    from replay_server_client import Collector
    from support.markers import MARKERS, marker_steps

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, files + 100), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(files)]
    with Collector.connect(name, schema=MARKERS, run_dir=run_dir) as collector:
        collector.write(marker_steps(1, 1, 0, 32))
        committed = collector.flush()
    for fd in held:
        os.close(fd)
    return committed


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1300, reason="the hard limit on open files is below 1,300")
def test_a_client_whose_descriptors_are_above_1023_works_as_ever(server: ServerProcess, children: Children) -> None:
    assert children.run(steps_committed_with_many_files_open, server.name, str(server.run_dir), 1100).result() == 32


def outcome_of_connect(name: str, run_dir: str, limit: int) -> str:
    import resource

    from replay_server_client import Collector, ReplayError
    from support.markers import MARKERS

    Collector.connect(name, schema=MARKERS, run_dir=run_dir).close()  # imports and caches what it needs
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        Collector.connect(name, schema=MARKERS, run_dir=run_dir, timeout=2.0).close()
    except ReplayError as error:
        return f"{type(error).__name__}: {error}"
    return "attached"


@pytest.mark.parametrize("limit", [4, 10, *rarely(6, 8, 12, 14)])
def test_a_client_that_may_open_too_few_files_says_so_and_the_server_serves_on(
    server: ServerProcess, children: Children, limit: int
) -> None:
    outcome = children.run(outcome_of_connect, server.name, str(server.run_dir), limit).result()
    assert outcome == "attached" or (outcome.startswith("BudgetExceeded: ") and "ulimit -n" in outcome)
    assert_serves(server)


# threads


PIDS = Path("/sys/fs/cgroup/pids")


@pytest.fixture
def pids_group() -> Iterator[Path]:
    """A control group of our own, for a limit on processes that also holds for root."""
    group = PIDS / f"replay-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error.strerror}")
    yield group
    group.rmdir()


def test_a_server_that_may_start_too_few_threads_ends_with_2_before_it_claims_anything(
    children: Children, run_dir: Path, pids_group: Path
) -> None:
    (pids_group / "pids.max").write_text("3")
    status, line = refused_start(children, shell(f"echo $$ > {pids_group}/cgroup.procs"), run_dir)
    assert status == 2
    assert "pids.max" in line


def test_a_client_that_may_start_too_few_threads_says_so(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", fail)
        for attempt in (lambda: Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir), lambda: report_of(server)):
            with pytest.raises(BudgetExceeded, match="ulimit -u"):
                attempt()
    assert_serves(server)


# disks


def test_a_trace_that_would_take_a_devices_place_is_refused_at_the_start(children: Children, run_dir: Path) -> None:
    status, line = refused_start(children, [], run_dir, "--trace", "/dev/full")
    assert status == 2
    assert "/dev/full" in line
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


@needs_mounts
def test_a_disk_that_is_full_at_the_end_costs_the_trace_and_nothing_else(run_dir: Path, children: Children, tmp_path: Path) -> None:
    server = spawn_server(children, run_dir, *SMALL, "--trace", str(tmp_path / "trace.json"), within=mounted(tmp_path, "size=4k"))
    assert_serves(server, steps=320)
    assert server.stop() == 0
    assert "trace.json' was not written: No space left on device" in server.child.output
    assert "Traceback" not in server.child.output


@needs_mounts
@pytest.mark.parametrize("options", ["nr_inodes=2", "ro", *rarely("nr_inodes=1", "nr_inodes=3")])
def test_a_run_directory_without_room_ends_the_start_with_2_and_names_it(children: Children, run_dir: Path, options: str) -> None:
    status, line = refused_start(children, mounted(run_dir, f"mode=700,{options}"), run_dir)
    assert status == 2
    assert str(run_dir) in line
    assert "--run-dir" in line


@needs_mounts
def test_a_full_disk_under_the_run_directory_ends_the_start_with_2(children: Children, run_dir: Path) -> None:
    full = shell(f"mount -t tmpfs -o size=4k,mode=700 tmpfs {run_dir} && head -c 4096 /dev/zero > {run_dir}/full")
    status, line = refused_start(children, ["unshare", "-m", *full], run_dir)
    assert status == 2
    assert "lock" in line
    assert "No space left" in line


# clocks

IN_ANOTHER_TIME = ["unshare", "-T", "--fork"]


def refusal_of(role: str, name: str, run_dir: str) -> str:
    from replay_server_client import AttachRefused, Collector
    from replay_server_protocol.endpoints import Endpoints
    from support.markers import MARKERS
    from support.raw_client import RawLearner

    try:
        if role == "learner":
            RawLearner(Endpoints.resolve(name, run_dir)).close()
        else:
            Collector.connect(name, run_dir=run_dir, schema=MARKERS).close()
    except AttachRefused as error:
        return str(error)
    return "attached"


@needs_time_namespaces
@pytest.mark.parametrize("offset", ["-1", *rarely("1000", "1")])
def test_a_learner_with_another_clock_is_refused_by_name_and_the_others_are_served(
    server: ServerProcess, children: Children, offset: str
) -> None:
    within = [*IN_ANOTHER_TIME, "--monotonic", offset]
    assert "monotonic clock" in run_within(children, within, refusal_of, "learner", server.name, str(server.run_dir)).result()
    assert_serves(server)


@needs_time_namespaces
def test_a_collector_needs_no_common_clock(server: ServerProcess, children: Children) -> None:
    within = [*IN_ANOTHER_TIME, "--monotonic", "1000"]
    assert run_within(children, within, refusal_of, "collector", server.name, str(server.run_dir)).result() == "attached"


@needs_time_namespaces
@pytest.mark.parametrize("role", ["learner", "collector"])
def test_a_client_with_another_boot_time_is_refused_and_told_of_time_namespaces(
    server: ServerProcess, children: Children, role: str
) -> None:
    within = [*IN_ANOTHER_TIME, "--boottime", "1000"]
    assert "time namespaces" in run_within(children, within, refusal_of, role, server.name, str(server.run_dir)).result()
    assert_serves(server)
