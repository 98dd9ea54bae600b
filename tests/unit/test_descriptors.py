"""What is kept free of the files that a server may open."""

from __future__ import annotations

import pytest

from replay_server import descriptors
from replay_server.descriptors import Room


@pytest.mark.parametrize("limit", [64, 90, 256, 1024, 4096, 524_288, 2**31])
def test_clients_are_refused_by_name_before_the_doors_shut_and_the_doors_before_the_limit(limit: int) -> None:
    room = Room.of_limit(limit)
    assert 0 < room.shut_below < room.open_from < room.reserve < limit
    assert room.shut_below >= min(limit // 8, 1024)


def test_without_proc_what_can_be_opened_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> list[str]:
        raise FileNotFoundError(path)

    room = Room.of_this_process()
    monkeypatch.setattr("replay_server.descriptors.os.listdir", missing)
    assert room.reserve < room.free() < 2 * room.limit
    descriptors.check_descriptors()
    descriptors.require_descriptors()


@pytest.mark.parametrize(("limit", "is_told"), [(512, True), (1024, False)])
def test_a_limit_below_which_a_burst_of_connections_may_end_the_server_is_told(
    limit: int, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("replay_server.descriptors.Room.of_this_process", lambda: Room.of_limit(limit))
    descriptors.require_descriptors()
    assert ("that connect at once may end it" in caplog.text) is is_told
