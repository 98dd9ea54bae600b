"""The status report is asked for without a session, and its absence is told in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from replay_server_client.status import query
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ProtocolViolation, ServerGone


@contextmanager
def answering(endpoints: Endpoints, answer: bytes) -> Iterator[list[bytes]]:
    """One request on the status socket is answered with ``answer``; yields what was asked."""
    asked: list[bytes] = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoints.status)

        def serve() -> None:
            identity, request = socket.recv_multipart()
            asked.append(request)
            socket.send_multipart((identity, answer))

        thread = threading.Thread(target=serve)
        thread.start()
        yield asked
        thread.join(10)
    endpoints.status_path.unlink(missing_ok=True)


def test_report_is_what_the_server_says(run_dir: Path) -> None:
    endpoints = Endpoints.resolve("s", run_dir)
    with answering(endpoints, b'{"phase": "serving"}') as asked:
        assert query(endpoints, 5.0) == {"phase": "serving"}
    assert asked == [b"status"]


@pytest.mark.parametrize("answer", [b"no", b"[1]", b"\xff"])
def test_answer_that_is_no_report_is_a_violation(run_dir: Path, answer: bytes) -> None:
    endpoints = Endpoints.resolve("s", run_dir)
    with answering(endpoints, answer), pytest.raises(ProtocolViolation):
        query(endpoints, 5.0)


def test_silence_raises_in_time_and_says_how_to_start_a_server(run_dir: Path) -> None:
    before = time.monotonic()
    with pytest.raises(ServerGone, match="replay-server serve --name nobody"):
        query(Endpoints.resolve("nobody", run_dir), 0.1)
    assert 0.1 <= time.monotonic() - before < 0.25
