"""Which side stream a learner gets: memory is kept for each, so as few as possible are used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replay_server_client import side_stream
from replay_server_client.side_stream import SideStreams

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_stream, "_idle", [])
    monkeypatch.setattr(side_stream, "SideStream", lambda device, *, captures: SimpleNamespace(device=device, captures=captures))


def test_learners_one_after_the_other_share_one_also_where_several_were_left() -> None:
    at_once = [SideStreams() for _ in range(4)]
    first: list[Any] = [streams.on(GPU, captures=True) for streams in at_once]
    assert len({id(side) for side in first}) == 4
    for streams in at_once:
        streams.give_back()
    used = set()
    for _ in range(8):
        streams = SideStreams()
        used.add(id(streams.on(GPU, captures=True)))
        streams.give_back()
    assert len(used) == 1


def test_a_stream_of_staged_gathers_is_never_captured() -> None:
    """Memory pinned by torch has been used on it."""
    staged, capturing = SideStreams(), SideStreams()
    side: Any = staged.on(GPU, captures=False)
    staged.give_back()
    assert capturing.on(GPU, captures=True) is not side
    assert SideStreams().on(GPU, captures=False) is side


def test_devices_have_their_own() -> None:
    streams = SideStreams()
    assert streams.on(GPU, captures=True) is not streams.on(torch.device("cuda", 1), captures=True)
    assert streams.on(GPU, captures=True) is streams.on(GPU, captures=True)
