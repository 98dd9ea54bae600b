"""What an error says of a server that does not answer: whether there is one, whether it is stopped, what to try."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from replay_server_client.silence import why_nobody_answers, why_silent
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.process import ProcessIdentity
from support.processes import Children

ME = ProcessIdentity.current()


@pytest.fixture
def endpoints(tmp_path: Path) -> Endpoints:
    return Endpoints.resolve("x", tmp_path)


def test_a_name_that_nobody_holds_comes_with_the_command_to_serve_it(endpoints: Endpoints) -> None:
    assert f"replay-server serve --name x --run-dir {endpoints.run_dir}" in why_nobody_answers(endpoints, 1.0)


def test_a_living_holder_of_the_name_is_named(endpoints: Endpoints) -> None:
    endpoints.lock_path.write_text(json.dumps({"pid": ME.pid, "start_ticks": ME.start_ticks}), "utf-8")
    assert f"server 'x' (pid {os.getpid()}) does not answer: it may be busy" in why_nobody_answers(endpoints, 1.0)


@pytest.mark.parametrize("record", ["", "[1]", "{", '{"pid": "1"}', f'{{"pid": {ME.pid}, "start_ticks": {ME.start_ticks + 1}}}'])
def test_a_lock_that_names_nobody_alive_counts_as_none(endpoints: Endpoints, record: str) -> None:
    endpoints.lock_path.write_text(record, "utf-8")
    assert "start one with" in why_nobody_answers(endpoints, 1.0)


def test_a_stopped_server_is_said_to_be_stopped_until_it_goes_on(children: Children) -> None:
    child = children.script("import time; print('ready', flush=True); time.sleep(60)")
    child.wait_for("ready")
    server = ProcessIdentity.of(child.pid)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert why_silent("x", server).endswith(f"its process is stopped: continue it with kill -CONT {child.pid}")
    assert not ProcessIdentity(child.pid, server.start_ticks + 1).is_stopped(), "another process of that pid"
    child.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    assert "it may be busy" in why_silent("x", server)
    child.kill()
