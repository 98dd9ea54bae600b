"""Clients in namespaces of their own (containers): two of one pid are two, and one that sees another /dev/shm is told so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from replay_server_client import Collector
from support.markers import MARKERS, marker_steps
from support.processes import Child, Children
from support.reports import assert_conserved, wait_report
from support.servers import ServerProcess

PATH = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
ELSEWHERE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
WRITER = """
    import itertools, os, sys
    from replay_server_client import Collector
    from support.markers import MARKERS, marker_steps

    name, run_dir, number = sys.argv[1:]
    with Collector.connect(name, schema=MARKERS, run_dir=run_dir, name=f"c{number}") as collector:
        for step in itertools.count(0, 8):
            collector.write(marker_steps(int(number), 1, step, 8))
            collector.flush()
            if step == 0:
                print("pid", os.getpid(), flush=True)
"""


OWN_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"')
WITHOUT_SHARED_MEMORY = """
    import sys
    from replay_server_client import Collector, Observer, ReplayError
    from support.markers import MARKERS

    name, run_dir = sys.argv[1:]
    for attempt in (
        lambda: Collector.connect(name, schema=MARKERS, run_dir=run_dir),
        lambda: Observer.connect(name, run_dir=run_dir).read(newest=1),
    ):
        try:
            attempt()
        except ReplayError as error:
            print(type(error).__name__, error, flush=True)
"""


def is_allowed(*elsewhere: str) -> bool:
    return subprocess.run([*elsewhere, "true"], capture_output=True, timeout=10, check=False).returncode == 0


def start_elsewhere(children: Children, elsewhere: tuple[str, ...], source: str, *arguments: str) -> Child:
    return children.start([*elsewhere, sys.executable, "-u", "-c", textwrap.dedent(source), *arguments], PYTHONPATH=PATH)


@pytest.mark.skipif(not is_allowed(*OWN_SHM), reason="unshare --mount with a mount of our own is not allowed")
def test_a_client_that_sees_another_dev_shm_is_refused_at_once_and_told_what_to_share(server: ServerProcess, children: Children) -> None:
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector:
        collector.write(marker_steps(0, 1, 0, 16))
        collector.flush()
        child = start_elsewhere(children, OWN_SHM, WITHOUT_SHARED_MEMORY, server.name, str(server.run_dir))
        assert child.wait() == 0
        told = child.output.splitlines()
        assert len(told) == 2
        assert all("the processes must share /dev/shm (docker: --ipc=host" in line for line in told), told
        report = wait_report(server, lambda found: len(found["collectors"]) == 1 and not found["observers"])
        assert report["collectors"][0]["pid"] == os.getpid()


@pytest.mark.slow
@pytest.mark.skipif(not is_allowed(*ELSEWHERE), reason="unshare --pid is not allowed")
def test_two_clients_of_one_pid_are_told_apart_and_one_death_ends_one_session(server: ServerProcess, children: Children) -> None:
    def start(number: int) -> Child:
        return start_elsewhere(children, ELSEWHERE, WRITER, server.name, str(server.run_dir), str(number))

    first, second = start(0), start(1)
    for child in (first, second):
        child.wait_for("pid 1")
    report = wait_report(server, lambda found: len(found["collectors"]) == 2)
    assert [collector["pid"] for collector in report["collectors"]] == [1, 1]
    first.kill()
    # No pidfd reaches into another namespace: the lost connection tells, after ten seconds.
    report = wait_report(server, lambda found: len(found["collectors"]) == 1, within_s=20)
    assert report["collectors"][0]["name"] == "c1"
    before = report["counters"]["rows_committed"]
    report = wait_report(server, lambda found: found["counters"]["rows_committed"] > before + 100)
    assert report["counters"]["sessions_lost"] == 1
    assert_conserved(report)
    second.send_signal(signal.SIGKILL)
    second.wait()
    wait_report(server, lambda found: not found["collectors"], within_s=20)
