"""The ring of an observer is unmapped only when no copy reads it any more, however its look has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from replay_server_client import observed_ring
from replay_server_client.bounce import HostBounce
from replay_server_client.deadline import Deadline
from replay_server_client.observed_ring import ObservedRing
from support.clock import FakeClock
from support.granting import GrantingConnection


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to the ring, in order."""
    found: list[str] = []

    def noted(owner: type, method: Callable[..., None]) -> None:
        def call(self: object) -> None:
            found.append(method.__name__)
            method(self)

        monkeypatch.setattr(owner, method.__name__, call)

    noted(HostBounce, HostBounce.finish)
    noted(observed_ring._HostRing, observed_ring._HostRing.close)
    return found


def test_copies_that_a_look_ended_in_the_middle_of_are_waited_for_before_the_ring_is_unmapped(done: list[str]) -> None:
    with contextlib.closing(GrantingConnection(FakeClock())) as connection:
        connection.attach(Deadline(1.0))
        observed = ObservedRing(connection)
        for _ in ("ring", "challenge", "proved"):
            observed.receive(0.0)
        assert observed.bounce is not None
        observed.let_go()
        assert done == ["finish", "close"]
        observed.let_go()
        assert done == ["finish", "close"]
