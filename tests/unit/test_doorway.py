"""A doorway: newcomers wait outside while it is shut, whoever is inside notices nothing, and it can be made again."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from replay_server_protocol.errors import InvalidRequest

from replay_server.control import Door, open_door


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context[zmq.Socket[bytes]]()
    yield context
    context.term()


@pytest.fixture
def door(context: zmq.Context[zmq.Socket[bytes]], run_dir: Path) -> Iterator[Door]:
    door = open_door(context, run_dir / "door", 1024, 16, 16)
    yield door
    door.close(0)


def knock(context: zmq.Context[zmq.Socket[bytes]], door: Door) -> zmq.Socket[bytes]:
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.setsockopt(zmq.RECONNECT_IVL, 20)
    client.connect(f"ipc://{door.way.path}")
    return client


def is_heard(client: zmq.Socket[bytes], door: Door, within_ms: int = 2000) -> bool:
    client.send(b"hello")
    return bool(door.socket.poll(within_ms)) and door.socket.recv_multipart()[1] == b"hello"


def test_it_is_for_this_user_alone(door: Door) -> None:
    assert door.way.path.stat().st_mode & 0o777 == 0o600


def test_while_it_is_shut_newcomers_are_turned_away_and_come_in_later(context: zmq.Context[zmq.Socket[bytes]], door: Door) -> None:
    with knock(context, door) as inside:
        assert is_heard(inside, door)
        door.way.shut()
        with knock(context, door) as outside, socket.socket(socket.AF_UNIX) as bare:
            bare.connect(str(door.way.path))
            assert not is_heard(outside, door, within_ms=50)
            assert door.way.turn_away() >= 1
            assert bare.recv(1) == b"", "it is told at once"
            assert is_heard(inside, door)
            door.way.open()
            assert is_heard(outside, door)


def test_made_again_it_lets_in_newcomers_and_keeps_who_was_inside(context: zmq.Context[zmq.Socket[bytes]], door: Door) -> None:
    with knock(context, door) as inside:
        assert is_heard(inside, door)
        number = door.way.fileno()
        door.way.path.unlink()
        assert not door.way.is_there()
        door.way.shut()
        door.way.renew(door.socket)
        assert door.way.is_there()
        assert door.way.fileno() == number, "pollers know it by that"
        with knock(context, door) as newcomer:
            assert is_heard(newcomer, door)
        assert is_heard(inside, door)


def test_removed_again_as_it_is_made_it_says_so_and_is_made_by_the_next_call(
    context: zmq.Context[zmq.Socket[bytes]], door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    door.way.path.unlink()
    with monkeypatch.context() as racing:
        racing.setattr(socket.socket, "listen", lambda listening, backlog: door.way.path.unlink())
        with pytest.raises(InvalidRequest, match="can't be bound"):
            door.way.renew(door.socket)
    assert not door.way.is_there()
    door.way.renew(door.socket)
    with knock(context, door) as newcomer:
        assert is_heard(newcomer, door)


def test_closed_it_leaves_nothing_and_takes_no_other_servers_socket(context: zmq.Context[zmq.Socket[bytes]], run_dir: Path) -> None:
    path = run_dir / "door"
    first = open_door(context, path, 1024, 16, 16)
    second = open_door(context, path, 1024, 16, 16)
    first.way.shut()
    first.close(0)
    assert second.way.is_there()
    second.close(0)
    assert not path.exists()
    assert os.listdir(run_dir) == []


def test_where_none_can_be_made_that_is_said(context: zmq.Context[zmq.Socket[bytes]], crash_dir: Path) -> None:
    (crash_dir / "door").mkdir()
    with pytest.raises(InvalidRequest, match="can't be bound"):
        open_door(context, crash_dir / "door", 1024, 16, 16)
