"""Clients in PID namespaces of their own (containers): two of one pid are two, and the death of one ends that one alone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import Child, Children
from support.reports import assert_conserved, wait_report
from support.servers import ServerProcess

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


def is_allowed() -> bool:
    return subprocess.run([*ELSEWHERE, "true"], capture_output=True, timeout=10, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not is_allowed(), reason="unshare --pid is not allowed")
def test_two_clients_of_one_pid_are_told_apart_and_one_death_ends_one_session(server: ServerProcess, children: Children) -> None:
    def start(number: int) -> Child:
        tests = str(Path(__file__).parents[1])
        command = [*ELSEWHERE, sys.executable, "-u", "-c", "\n".join(line[4:] for line in WRITER.splitlines())]
        return children.start([*command, server.name, str(server.run_dir), str(number)], name=f"c{number}", PYTHONPATH=tests)

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
