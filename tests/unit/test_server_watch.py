"""The watch of a server's process: what it sees of a death, when it looks, and what it never takes for the server."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from replay_server_client import server_watch
from replay_server_client.server_watch import ServerWatch
from replay_server_protocol import process
from replay_server_protocol.process import ProcessIdentity
from support.clock import FakeClock
from support.leaks import nothing_left
from support.processes import Child, Children

ME = ProcessIdentity.current()


@pytest.fixture
def child() -> Iterator[Child]:
    with Children() as children:
        child = children.script("print('up', flush=True); import signal; signal.pause()")
        child.wait_for("up")
        yield child


@pytest.fixture
def watch(child: Child) -> Iterator[ServerWatch]:
    """Watches the child."""
    with nothing_left():
        watch = ServerWatch()
        watch.watch(ProcessIdentity.of(child.pid))
        yield watch
        watch.forget()


def test_a_process_is_seen_to_end_and_not_before(child: Child, watch: ServerWatch) -> None:
    assert not watch.has_ended()
    assert not watch.is_seen_ended()
    child.kill()
    assert watch.has_ended(within_s=10.0)
    watch.look_at_once()
    assert watch.is_seen_ended()


def test_a_death_is_waited_for_as_long_as_was_said(child: Child, watch: ServerWatch) -> None:
    killing = threading.Timer(0.1, os.kill, (child.pid, signal.SIGKILL))
    killing.start()
    assert watch.has_ended(within_s=10.0)
    killing.join()
    child.kill()  # which takes it in


def test_whoever_asks_after_every_read_has_it_looked_at_now_and_then_and_at_once_after_a_sleep(
    child: Child, watch: ServerWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(server_watch, "time", SimpleNamespace(monotonic=clock))
    assert not watch.is_seen_ended()
    child.kill()
    assert watch.has_ended(within_s=10.0)
    assert not watch.is_seen_ended(), "it has looked a moment ago"
    clock.advance(0.02)
    assert watch.is_seen_ended()
    assert not watch.is_seen_ended()
    watch.look_at_once()
    assert watch.is_seen_ended()


def test_a_process_that_was_forgotten_is_not_seen_to_end(child: Child, watch: ServerWatch) -> None:
    child.kill()
    assert watch.has_ended(within_s=10.0)
    watch.forget()
    assert (watch.pidfd, watch.has_ended(), watch.is_seen_ended()) == (None, False, False)
    watch.forget()


def test_another_process_of_the_same_pid_is_not_watched() -> None:
    with nothing_left():
        watch = ServerWatch()
        watch.watch(ProcessIdentity(ME.pid, ME.start_ticks + 1))
        assert watch.pidfd is None
        watch.watch(ProcessIdentity(2**22 + 1, 1))
        assert watch.pidfd is None, "no such process here"
        assert not watch.has_ended()


def test_a_process_whose_start_cannot_be_read_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "read_start_ticks", lambda _: 0)
    with nothing_left():
        watch = ServerWatch()
        watch.watch(ProcessIdentity.of(ME.pid))
        assert watch.pidfd is None, "it may be another one by then"


def test_where_no_process_can_be_watched_none_is_seen_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    watch = ServerWatch()
    watch.watch(ME)
    assert (watch.pidfd, watch.has_ended(), watch.is_seen_ended()) == (None, False, False)
