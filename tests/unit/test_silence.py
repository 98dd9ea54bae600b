"""What an error says of a server that does not answer: whether there is one, whether it is stopped, what to try."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from replay_server_client import Collector, ServerGone, connection, silence
from replay_server_client.silence import SilenceLog, why_nobody_answers, why_silent
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.process import ProcessIdentity
from support.clock import FakeClock
from support.markers import MARKERS
from support.processes import Children

ME = ProcessIdentity.current()


@pytest.fixture
def endpoints(tmp_path: Path) -> Endpoints:
    return Endpoints.resolve("x", tmp_path)


def test_a_name_that_nobody_holds_comes_with_the_command_to_serve_it(endpoints: Endpoints) -> None:
    assert f"replay-server serve --name x --run-dir {endpoints.run_dir}" in why_nobody_answers(endpoints, 1.0)


def test_a_run_directory_that_is_gone_is_told(tmp_path: Path) -> None:
    gone = Endpoints.resolve("x", tmp_path / "gone")
    assert "gone for 1.0 s: there is no such directory; start one with: replay-server serve" in why_nobody_answers(gone, 1.0)
    gone.run_dir.mkdir()
    assert "gone for 1.0 s; start one with: replay-server serve" in why_nobody_answers(gone, 1.0)


def test_of_a_spawned_server_it_is_told_what_ended_it_and_not_to_start_one_in_its_place(tmp_path: Path) -> None:
    spawned = Endpoints.resolve("x", tmp_path / "replay-0a1b2c3d")
    assert "replay-0a1b2c3d for 1.0 s: that server has ended, and its run directory with it." in why_nobody_answers(spawned, 1.0)
    spawned.run_dir.mkdir()
    text = why_nobody_answers(spawned, 1.0)
    assert "for 1.0 s: that server has ended. ReplayServer.spawn()" in text
    assert "log_lines()" in text
    assert "start one" not in text


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


class Wait:
    """One client's wait, a turn a second; ``asked`` has the seconds at which the server was asked."""

    def __init__(self, clock: FakeClock) -> None:
        self.log, self.asked = SilenceLog("collector c"), list[float]()
        self._clock, self._begun_s = clock, clock()

    def turns(self, seconds: int, *, is_answered: bool) -> None:
        for _ in range(seconds):
            self._clock.advance(1)
            if self.log.wait(self._begun_s, self._ask, lambda: "it is stopped") and is_answered:
                self.log.heard()

    def _ask(self) -> None:
        self.asked.append(self._clock() - self._begun_s)


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Wait:
    clock = FakeClock()
    monkeypatch.setattr(silence, "time", SimpleNamespace(monotonic=clock))
    return Wait(clock)


def test_a_server_that_answers_is_asked_every_two_seconds_and_not_told_of(wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    wait.turns(9, is_answered=True)
    assert wait.asked == [2, 4, 6, 8]
    assert caplog.messages == []


def test_a_silent_server_is_told_of_within_five_seconds_once_a_period_and_when_it_is_back(
    wait: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    wait.turns(40, is_answered=False)
    assert wait.asked == [2]
    assert caplog.messages == [f"collector c has waited for {s}.0 s: it is stopped" for s in (4, 34)]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    wait.log.heard()
    wait.log.heard()
    assert caplog.messages[2:] == ["collector c recovered after 40.0 s"]
    wait.turns(4, is_answered=False)
    assert caplog.messages[3:] == ["collector c has waited for 43.0 s: it is stopped"]


def test_a_question_that_can_not_be_sent_ends_no_wait(wait: Wait) -> None:
    def ask() -> None:
        raise ServerGone("not attached")

    assert wait.log.wait(-10.0, ask, lambda: "")


def test_a_client_that_waits_for_a_server_to_come_tells_its_log_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_HELLO_AGAIN_S", 0.02)
    monkeypatch.setattr(silence, "ASK_EVERY_S", 0.02)
    with pytest.raises(ServerGone):
        Collector.connect("x", schema=MARKERS, run_dir=tmp_path, name="walker", timeout=0.3)
    (line,) = caplog.messages
    assert line.startswith("collector walker has waited for 0.")
    assert "start one with: replay-server serve --name x" in line
