"""The status socket's share of the loop: it rests for the time that its answers took, not for that which others took meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from replay_server_protocol.endpoints import Endpoints

from replay_server.status import StatusSocket


def test_an_answer_that_was_interrupted_does_not_silence_the_socket(crash_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the loop's thread waits for a core in the middle of an answer; 50 ms of that made a second of silence."""

    def interrupted(replay: object) -> dict[str, object]:
        time.sleep(0.05)
        return {}

    monkeypatch.setattr("replay_server.status.report", interrupted)
    endpoints = Endpoints(crash_dir, "share")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        status = StatusSocket(context, SimpleNamespace(directory=SimpleNamespace(endpoints=endpoints)))  # type: ignore[arg-type]
        try:
            socket.connect(endpoints.status)
            socket.send(b"status")
            end = time.monotonic() + 5
            while not status.answer_nowait(is_busy=False):
                assert time.monotonic() < end
            assert socket.poll(5000)
            assert status.rest_until_s - time.monotonic() < 0.5
        finally:
            status.close()
