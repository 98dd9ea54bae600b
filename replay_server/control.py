"""The control socket: one ROUTER for all sessions. Bytes in, checked messages out; never waits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import zmq
from replay_server_protocol.codec import client_codec, server_codec
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import MAX_MESSAGE_BYTES, ClientMessage, ServerMessage

from replay_server.doorway import Doorway

_MOST_OTHERS = 64
_MOST_UNSENT = 1000


class ControlSocket:
    """Receives (identity, message) and sends to identities. The kernel tells libzmq the peer's uid; others than ours are turned away."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Endpoints, depth: int) -> None:
        """``most_unread`` messages of one peer wait in this process: with MAX_MESSAGE_BYTES what a peer that floods can cost.

        Room for every slot of a collector, published and repeated: libzmq drops what a peer that dies beyond the mark had still sent.
        """
        self.most_unread = _MOST_OTHERS + 2 * depth
        self.door = open_door(context, endpoints.control_path, MAX_MESSAGE_BYTES, self.most_unread, _MOST_UNSENT)
        self.socket = self.door.socket

    def receive_nowait(self) -> tuple[bytes, ClientMessage | ProtocolViolation] | None:
        """The next message and who sent it; a malformed one comes as the violation it is. None when none is there."""
        received = receive_nowait(self.socket)
        if received is None:
            return None
        identity, packed, extra = received
        try:
            if extra:
                raise ProtocolViolation(f"a message is one frame, {extra + 1} came")
            return identity, client_codec.decode(packed)
        except ProtocolViolation as violation:
            return identity, violation

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
        self.door.close(linger_ms=200)


def receive_nowait(socket: zmq.Socket[bytes]) -> tuple[bytes, bytes, int] | None:
    """Identity, first frame and the number of frames after it, which are dropped one by one; None when no message is there.

    The frames of a message come all at once, and a peer's message has at least one.
    """
    try:
        identity = socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
    frame, extra = socket.recv(zmq.NOBLOCK), 0
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv(zmq.NOBLOCK)
        extra += 1
    return identity, frame, extra


@dataclass(frozen=True, slots=True)
class Door:
    """A bound socket, and the doorway that leads to it."""

    way: Doorway
    socket: zmq.Socket[bytes]

    def close(self, linger_ms: int) -> None:
        self.way.close()
        self.socket.close(linger=linger_ms)


def open_door(context: zmq.Context[zmq.Socket[bytes]], path: Path, most_bytes: int, most_unread: int, most_unsent: int) -> Door:
    """A ROUTER that only processes of this uid can use: in a 0700 directory, mode 0600, and filtered by the peer's uid.

    ``most_bytes`` is the largest frame; a peer that sends a larger one is cut off. ``most_unread`` and ``most_unsent`` bound the messages
    of one peer that wait to be read here and there. A peer beyond the first is not read on until some were taken: its own sends wait.
    Mandatory routing makes the second a refusal that the sender sees, where a ROUTER would else drop in silence; without handover a
    second peer of the same identity can't take over the first one's route.
    """
    way = Doorway(path)
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    socket.setsockopt(zmq.RCVHWM, most_unread)
    socket.setsockopt(zmq.SNDHWM, most_unsent)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)  # a connection that says nothing costs a descriptor no longer than that
    socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    way.lead_to(socket)
    return Door(way, socket)
