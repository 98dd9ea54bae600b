"""A test run that is killed leaves no child behind, and a server of it no segment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from replay_server_protocol.process import ProcessIdentity
from replay_server_protocol.segment import segment_dir
from support.processes import Children
from support.rarely import rarely
from support.reaper import Reaper

TESTS = Path(__file__).parents[1]
WITHIN_S = 10.0
RUN = """
import time

import numpy as np
from replay_server_client import Collector, Schema

def test_that_is_killed(server):
    with Collector.connect(server.name, schema=Schema.of(x="float32"), run_dir=server.run_dir) as collector:
        collector.write({"x": np.ones(1, np.float32)})
        collector.flush()
        print(f"its server is {server.pid} in {server.run_dir}.", flush=True)
        time.sleep(60)
"""


def wait_dead(process: ProcessIdentity) -> None:
    end = time.monotonic() + WITHIN_S
    while process.is_alive():
        assert time.monotonic() < end, f"{process} lives on"
        time.sleep(0.01)  # nobody's child here


@pytest.mark.parametrize("number", [signal.SIGTERM, *rarely(signal.SIGKILL)])
def test_the_server_of_a_killed_run_ends_and_leaves_no_segment(tmp_path: Path, children: Children, number: signal.Signals) -> None:
    (tmp_path / "test_run.py").write_text(RUN, "utf-8")
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    options = ["-p", "conftest", "-p", "no:cacheprovider", "-s", "--rootdir", str(tmp_path), "-c", os.devnull]
    run = children.start([sys.executable, "-m", "pytest", *options, str(tmp_path / "test_run.py")], PYTHONPATH=path)
    run.wait_for(".\n")
    ((pid, run_dir),) = re.findall(r"its server is (\d+) in (.*)\.\n", run.output)
    server = ProcessIdentity.of(int(pid))
    before = set(os.listdir(segment_dir()))
    assert server.is_alive()
    os.kill(run.pid, number)
    assert run.wait() == -number
    wait_dead(server)
    gone = before - set(os.listdir(segment_dir()))
    assert any(name.endswith("-ring") for name in gone)
    Path(run_dir).rmdir()  # the run's own, and empty


def test_a_stopped_child_and_what_it_started_are_ended_and_one_that_was_forgotten_is_not(children: Children) -> None:
    """The group's leader has ended and its own child is stopped: what SIGTERM alone, or the pid alone, would not reach."""
    starts = "import subprocess; print('started', subprocess.Popen(['sleep', '60']).pid, flush=True)"
    left = subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, start_new_session=True, text=True)
    spared = children.script("import time; time.sleep(60)")
    reaper = Reaper()
    for pid in (left.pid, spared.pid):
        reaper.watch(pid)
    assert left.stdout is not None
    orphan = ProcessIdentity.of(int(left.stdout.readline().split()[1]))
    left.wait()
    left.stdout.close()
    os.kill(orphan.pid, signal.SIGSTOP)
    reaper.forget(spared.pid)
    reaper.close()
    wait_dead(orphan)
    assert spared.is_alive()
    spared.kill()
