"""The control socket: one ROUTER for all sessions. Bytes in, checked messages out; never waits."""

from __future__ import annotations

import os

import zmq
from replay_server_protocol.codec import client_codec, server_codec
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import MAX_MESSAGE_BYTES, ClientMessage, ServerMessage


class ControlSocket:
    """Receives (identity, message) and sends to identities. The kernel tells libzmq the peer's uid; others than ours are turned away."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Endpoints) -> None:
        self.socket = bind_private(context, zmq.ROUTER, endpoints.control)

    def receive_nowait(self) -> tuple[bytes, ClientMessage | ProtocolViolation] | None:
        """The next message and who sent it; a malformed one comes as the violation it is. None when none is there."""
        socket = self.socket
        try:
            identity = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        packed = socket.recv(zmq.NOBLOCK)  # the frames of a message come all at once, and a peer's message has at least one
        try:
            self._check_ends()
            return identity, client_codec.decode(packed)
        except ProtocolViolation as violation:
            return identity, violation

    def _check_ends(self) -> None:
        extra = 0
        while self.socket.getsockopt(zmq.RCVMORE):
            self.socket.recv(zmq.NOBLOCK)
            extra += 1
        if extra:
            raise ProtocolViolation(f"a message is one frame, {extra + 1} came")

    def send(self, identity: bytes, message: ServerMessage) -> bool:
        """Queues a message. False when the peer's connection is gone; a peer that doesn't read loses the message (it asks again)."""
        try:
            self.socket.send(identity, zmq.NOBLOCK | zmq.SNDMORE)
            self.socket.send(server_codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        self.socket.close(linger=200)


def bind_private(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    """A bound socket that only processes of this uid can use: in a 0700 directory, mode 0600, and filtered by the peer's uid."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.BACKLOG, 512)
    socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    before = os.umask(0o177)
    try:
        socket.bind(address)
    finally:
        os.umask(before)
    return socket
