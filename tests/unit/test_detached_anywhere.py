"""A connection that Ctrl-C ends in the midst of leaving a server: the next call of it finishes, and nothing is left open."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_server_client import connection, server_watch
from replay_server_client.connection import Connection
from replay_server_client.deadline import Deadline
from replay_server_client.ingress import CollectorHello
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ServerGone
from replay_server_protocol.process import ProcessIdentity
from support.fake_server import FakeServer
from support.interrupts import ended_at
from support.leaks import nothing_left
from support.resumed import SCHEMA


@pytest.mark.parametrize("then", [Connection.detach, Connection.say_bye, Connection.receive_nowait])
def test_leaving_a_server_is_finished_by_the_next_call_wherever_it_was_ended(run_dir: Path, then: Callable[[Connection], object]) -> None:
    hello = CollectorHello("leaver", SCHEMA, 1, False, None)
    with (
        nothing_left(),
        FakeServer(run_dir, lends=False) as server,
        contextlib.closing(Connection(Endpoints.resolve(server.name, run_dir), hello)) as client,
    ):
        for place in itertools.count():
            client.attach(Deadline(5.0))
            client._server.watch(ProcessIdentity.current())
            assert client._server.pidfd is not None
            is_ended = ended_at(place, client.detach, connection, server_watch)
            assert client._server.pidfd is not None or not client.is_attached, "an attached client sees its server die"
            with contextlib.suppress(ServerGone):
                then(client)
            if not is_ended:
                break
    assert place >= 5
