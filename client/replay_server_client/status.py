"""The status report of a server, from its own socket: never on the data path, and no session."""

from __future__ import annotations

import json

import zmq
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ProtocolViolation, ServerGone

from replay_server_client.connection import check_descriptors, check_threads
from replay_server_client.deadline import Deadline
from replay_server_client.silence import why_nobody_answers

_REQUEST = b"status"
_MAX_REPORT_BYTES = 16 << 20


def query(endpoints: Endpoints, timeout: float | None = 1.0) -> dict[str, object]:
    """The report as a dict (docs name its keys). Raises ServerGone when no server answers within ``timeout`` seconds."""
    deadline = Deadline(timeout)
    check_descriptors()
    check_threads()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REPORT_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.connect(endpoints.status)
        socket.send(_REQUEST)
        while not socket.poll(int(min(deadline.remaining_s, 0.5) * 1000) + 1):  # wakes for Ctrl-C at least twice a second
            if deadline.has_passed:
                raise ServerGone(why_nobody_answers(endpoints, deadline.elapsed_s))
        return _report_of(socket.recv())


def _report_of(packed: bytes) -> dict[str, object]:
    try:
        report = json.loads(packed)
    except ValueError as error:
        raise ProtocolViolation(f"the status report is not JSON: {error}") from error
    if not isinstance(report, dict):
        raise ProtocolViolation("the status report is not a JSON object")
    return report
