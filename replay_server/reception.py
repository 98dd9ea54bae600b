"""What has come from clients, taken in turns: each message goes to the session that it belongs to, or is counted and refused."""

from __future__ import annotations

import logging
import math
import time

from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import ClientMessage, Hello, Stale
from replay_server_protocol.states import SessionEvent, SessionState

from replay_server.attach import AttachDesk
from replay_server.dispatch import Dispatch
from replay_server.replay import Replay

log = logging.getLogger("replay_server")

_MESSAGES_A_TURN = 512
_RECEIVE_WITHIN_S = 0.002
_MOST_STRANGERS = 64


class Reception:
    """Of the control socket. ``is_read_empty`` tells whether the last turn took all there was."""

    def __init__(self, replay: Replay, desk: AttachDesk, dispatch: Dispatch) -> None:
        self.is_read_empty = False
        self._replay = replay
        self._desk = desk
        self._dispatch = dispatch

    def take_turn(self) -> bool:
        """Takes what has come, up to a limit, so that a flood can't keep the rest of the loop from its turn. Peers take turns.

        True if there was a message.
        """
        return self._take_what_came(_MESSAGES_A_TURN, time.monotonic() + _RECEIVE_WITHIN_S)

    def take_all(self) -> bool:
        """Reads the socket empty; under a flood, which never lets it be, so often that each peer's turn has come for all it had sent."""
        return self._take_what_came(self._replay.control.most_unread * (len(self._replay.sessions) + _MOST_STRANGERS), math.inf)

    def _take_what_came(self, most: int, until_s: float) -> bool:
        control = self._replay.control
        now_s, has_taken = time.monotonic(), False
        for _ in range(most):
            received = control.receive_nowait()
            if received is None:
                self.is_read_empty = True
                return has_taken
            has_taken = True
            self._take(*received, now_s)
            now_s = time.monotonic()
            if now_s >= until_s:
                break
        self.is_read_empty = False
        return has_taken

    def _take(self, identity: bytes, message: ClientMessage | ProtocolViolation, now_s: float) -> None:
        if isinstance(message, ProtocolViolation):
            self._replay.counters.bad_messages += 1
            log.debug("bad message: %s", message)
            return
        if isinstance(message, Hello):
            self._desk.greet(identity, message, now_s)
            return
        session = self._replay.sessions.get(message.session, identity)
        if session is None or message.generation != self._replay.generation:
            self._replay.counters.stale_messages += 1
            self._replay.control.send(identity, Stale(0, self._replay.generation))
            return
        session.heard_s = now_s
        if session.state is SessionState.AWAY:
            session.happen(SessionEvent.FOUND)
            session.lost_since_s = None
        self._dispatch.take(session, message)
