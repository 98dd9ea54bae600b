"""Client and server of different protocol versions: a refusal that says what to install, and nothing else happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from replay_server_client import Collector, Learner
from replay_server_client.admin import Admin
from replay_server_protocol.errors import AttachRefused
from replay_server_protocol.messages import PROTOCOL_VERSION
from support.markers import MARKERS
from support.rarely import rarely
from support.reports import report_of
from support.servers import ServerProcess

CLIENTS: dict[str, Callable[[ServerProcess], Any]] = {
    "collector": lambda server: Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir),
    "learner": lambda server: Learner.connect(server.name, device="cpu", run_dir=server.run_dir),
    "admin": lambda server: Admin.connect(server.name, run_dir=server.run_dir),
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("change", [1, *rarely(-1)])
def test_another_version_is_refused_at_once_and_the_server_goes_on(
    start_server: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch, client: str, change: int
) -> None:
    server = start_server("--capacity", "64", "--slot-rows", "16")
    with monkeypatch.context() as patched:
        patched.setattr("replay_server_client.hello.PROTOCOL_VERSION", PROTOCOL_VERSION + change)
        told = f"the client speaks protocol {PROTOCOL_VERSION + change}, the server {PROTOCOL_VERSION}: install the same on both sides"
        with pytest.raises(AttachRefused, match=told):
            CLIENTS[client](server)
    assert report_of(server)["counters"]["sessions_opened"] == 0, "the status socket knows no protocol version"
    CLIENTS[client](server).close()
    assert report_of(server)["counters"]["sessions_opened"] == 1
