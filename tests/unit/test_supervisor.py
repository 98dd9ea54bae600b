"""What a supervisor hears, and that nobody else is spoken to."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay_server.supervisor import Supervisor


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


def messages(listener: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(listener.recv(4096).decode())
        except BlockingIOError:
            return found


def environment(listener: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": str(listener.getsockname()), **more}


def test_ready_is_told_once_and_the_phase_when_it_changes(heard: socket.socket) -> None:
    supervisor = Supervisor.of(environment(heard))
    supervisor.tell("waiting_for_memory", 0.0, is_ready=False)
    supervisor.tell("waiting_for_memory", 1.0, is_ready=False)
    supervisor.tell("serving", 2.0, is_ready=True)
    supervisor.tell("serving", 3.0, is_ready=True)
    supervisor.stopping()
    assert messages(heard) == ["STATUS=waiting for memory", "READY=1\nSTATUS=serving", "STOPPING=1"]


def test_signs_of_life_come_twice_in_the_time_allowed(heard: socket.socket) -> None:
    supervisor = Supervisor.of(environment(heard, WATCHDOG_USEC="4000000", WATCHDOG_PID=str(os.getpid())))
    for tenth in range(100):
        supervisor.tell("serving", 50.0 + tenth / 10, is_ready=True)
    assert "\n".join(messages(heard)).count("WATCHDOG=1") == 5


@pytest.mark.parametrize("more", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}])
def test_without_a_watchdog_of_ours_there_are_no_signs_of_life(heard: socket.socket, more: dict[str, str]) -> None:
    supervisor = Supervisor.of(environment(heard, **more))
    for second in range(10):
        supervisor.tell("serving", float(second), is_ready=True)
    assert messages(heard) == ["READY=1\nSTATUS=serving"]


def test_what_could_not_be_sent_is_told_again(heard: socket.socket) -> None:
    path = Path(heard.getsockname())
    supervisor = Supervisor.of(environment(heard))
    away = path.rename(path.with_name("away"))
    supervisor.tell("serving", 0.0, is_ready=True)
    away.rename(path)
    supervisor.tell("serving", 1.0, is_ready=True)
    assert messages(heard) == ["READY=1\nSTATUS=serving"]


def test_an_abstract_socket_is_reached() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        name = f"replay-server-test-{os.getpid()}"
        listener.bind(f"\0{name}")
        listener.setblocking(False)
        Supervisor.of({"NOTIFY_SOCKET": f"@{name}"}).tell("serving", 0.0, is_ready=True)
        assert messages(listener) == ["READY=1\nSTATUS=serving"]


@pytest.mark.parametrize("given", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}, {"NOTIFY_SOCKET": "/nowhere/notify"}])
def test_without_a_supervisor_nothing_is_said_and_nothing_fails(given: dict[str, str]) -> None:
    supervisor = Supervisor.of(given)
    supervisor.tell("serving", 0.0, is_ready=True)
    supervisor.stopping()
