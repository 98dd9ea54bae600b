"""What an error says of a server that does not answer: whether there is one, whether it is stopped, what to try."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from replay_server_client import Collector, ServerGone, connection, silence
from replay_server_client.connection import Connection
from replay_server_client.deadline import Deadline
from replay_server_client.hello import hello_of
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
        self._clock, self._first_s = clock, clock()
        self._begun_s = self._first_s

    def begin(self, *, idle_s: float = 0.0) -> None:
        """The wait is over; another one begins after ``idle_s`` in which nobody waits."""
        self._clock.advance(idle_s)
        self._begun_s = self._clock()

    def greet(self, seconds: int) -> None:
        """Turns of a wait that began with a question."""
        for _ in range(seconds):
            self._clock.advance(1)
            assert not self.log.wait(self._begun_s, None, lambda: "nobody is there")

    def turns(self, seconds: int, *, is_answered: bool) -> None:
        for _ in range(seconds):
            self._clock.advance(1)
            if self.log.wait(self._begun_s, self._ask, lambda: "it is stopped") and is_answered:
                self.log.heard()

    def _ask(self) -> None:
        self.asked.append(self._clock() - self._first_s)


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
    assert caplog.messages == [f"collector c has had no answer for {s}.0 s, in a wait of {s + 2}.0 s: it is stopped" for s in (2, 32)]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    wait.log.heard()
    wait.log.heard()
    assert caplog.messages[2:] == ["collector c recovered after 38.0 s without an answer"]
    wait.turns(4, is_answered=False)
    assert caplog.messages[3:] == ["collector c has had no answer for 2.0 s, in a wait of 43.0 s: it is stopped"]


def test_a_silence_counts_from_the_first_question_without_an_answer_however_old_the_wait(
    wait: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    wait.turns(100, is_answered=True)
    wait.turns(4, is_answered=False)
    assert wait.asked[-1] == 102
    assert caplog.messages == ["collector c has had no answer for 2.0 s, in a wait of 104.0 s: it is stopped"]
    wait.log.heard()
    assert caplog.messages[1:] == ["collector c recovered after 2.0 s without an answer"]


def test_a_wait_that_begins_when_the_server_has_just_answered_knows_of_no_silence(wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    wait.turns(3, is_answered=False)
    wait.log.heard()
    wait.begin()
    wait.turns(3, is_answered=False)
    assert wait.asked == [2, 5]
    assert caplog.messages == []
    wait.turns(1, is_answered=False)
    assert caplog.messages == ["collector c has had no answer for 2.0 s, in a wait of 4.0 s: it is stopped"]


def test_after_a_pause_the_server_is_asked_anew_and_the_pause_is_no_silence(wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    wait.turns(3, is_answered=False)
    wait.begin(idle_s=3600.0)
    wait.turns(3, is_answered=False)
    assert wait.asked == [2, 3605]
    assert caplog.messages == []
    wait.turns(1, is_answered=False)
    assert caplog.messages == ["collector c has had no answer for 2.0 s, in a wait of 4.0 s: it is stopped"]


def test_an_answer_that_is_read_after_a_pause_is_told_with_the_pause(wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    wait.turns(5, is_answered=False)
    wait.begin(idle_s=3600.0)
    wait.log.heard()
    assert caplog.messages[1:] == ["collector c recovered: it had no answer for 3.0 s, and did not wait for the 3600.0 s since"]
    wait.turns(3, is_answered=True)
    assert wait.asked == [2, 3607]


def test_a_silence_lasts_over_waits_that_follow_each_other(wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(4):
        wait.turns(3, is_answered=False)
        wait.begin(idle_s=1.0)
    assert wait.asked == [2]
    assert caplog.messages == ["collector c has had no answer for 3.0 s, in a wait of 1.0 s: it is stopped"]
    wait.log.heard()
    assert caplog.messages[1:] == ["collector c recovered after 14.0 s without an answer"]


def test_a_wait_that_began_with_a_question_counts_from_there(wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    wait.turns(9, is_answered=True)
    wait.begin()
    wait.greet(3)
    assert caplog.messages == []
    wait.greet(1)
    assert caplog.messages == ["collector c has had no answer for 4.0 s, in a wait of 4.0 s: nobody is there"]


def test_a_silence_goes_on_when_the_server_is_lost_in_it(wait: Wait, caplog: pytest.LogCaptureFixture) -> None:
    wait.turns(3, is_answered=False)
    wait.begin()
    wait.greet(3)
    assert caplog.messages == ["collector c has had no answer for 4.0 s, in a wait of 3.0 s: nobody is there"]


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
    assert line.startswith("collector walker has had no answer for 0.")
    assert "start one with: replay-server serve --name x" in line


def test_a_call_that_finds_no_server_any_more_counts_from_when_it_looked_for_one(endpoints: Endpoints) -> None:
    deadline = Deadline(0.1)
    deadline.started -= 100.0  # spent in a wait that a server answered
    client = Connection(endpoints, partial(hello_of, "admin", ""))
    with contextlib.closing(client), pytest.raises(ServerGone, match=r"no server called 'x' answered in .* for 0\.\d s"):
        client.attach(deadline)
