"""Clients that go without a BYE: their process has died, or their connection stays away."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.messages import Ping
from replay_server_protocol.process import ProcessIdentity
from replay_server_protocol.states import SessionEvent, SessionState

from replay_server.attach import AttachDesk
from replay_server.replay import Replay
from replay_server.sessions import GONE_AFTER_S, PING_EVERY_S, Session

log = logging.getLogger("replay_server")

_BURY_WITHIN_S = 1.0
_PARENT_TOKEN = 0


class Departures:
    """Ends such sessions; and ``stop`` is called when the parent process goes, where one is watched. Told the time."""

    def __init__(self, replay: Replay, desk: AttachDesk, receive_all: Callable[[], object], stop: Callable[[], None]) -> None:
        """``receive_all`` takes every message that has come."""
        self._replay = replay
        self._desk = desk
        self._receive_all = receive_all
        self._stop = stop
        self._dying: dict[int, float] = {}  # sessions of dead processes, and until when their last messages are waited for

    @property
    def is_waiting(self) -> bool:
        """Whether the last messages of somebody who has died are still to come."""
        return bool(self._dying)

    def watch_parent(self, pid: int) -> None:
        """Raises InvalidRequest where ``pid`` is not this process's parent any more."""
        if os.getppid() != pid or not self._replay.deaths.watch(_PARENT_TOKEN, ProcessIdentity.of(pid)):
            raise InvalidRequest(f"--parent-pid {pid}: that process is not this one's parent any more")

    def bury(self, now_s: float) -> bool:
        """Ends the sessions of dead processes, after all they published was read: what they published before they died counts.

        A death is often seen before libzmq's own thread has read the last messages out of the kernel. It has once it has noticed that the
        connection is gone; a forked child may keep that open, so nobody is waited for longer than _BURY_WITHIN_S.
        True if somebody died or is waited for.
        """
        for token in self._replay.deaths.dead():
            self._replay.deaths.unwatch(token)
            if token == _PARENT_TOKEN:
                log.info("the parent process has ended")
                self._stop()
            else:
                self._dying[token] = now_s + _BURY_WITHIN_S
        if not self._dying:
            return False
        dying = [session for session in self._replay.sessions if session.token in self._dying]
        gone = [s for s in dying if now_s >= self._dying[s.token] or not self._replay.send(s, Ping(s.token, self._replay.generation))]
        if gone:
            self._receive_all()
        for session in gone:
            if session.state is not SessionState.ENDED:  # its BYE may have been among the last messages
                self._desk.end(session, "its process has died", is_dead=True)
        self._dying = {session.token: self._dying[session.token] for session in dying if session not in gone}
        return True

    def probe(self, session: Session, now_s: float) -> None:
        """A PING to a silent session shows whether its connection stands; one that stays away ends, its leases run to their deadlines."""
        if session.lost_since_s is None and now_s - max(session.heard_s, session.pinged_s) < PING_EVERY_S:
            return
        session.pinged_s = now_s
        if self._replay.send(session, Ping(session.token, self._replay.generation)):
            if session.state is SessionState.AWAY:
                session.happen(SessionEvent.FOUND)
            session.lost_since_s = None
            return
        if session.state is SessionState.ATTACHED:
            session.happen(SessionEvent.LOST)
        if session.lost_since_s is None:
            session.lost_since_s = now_s
        if now_s - session.lost_since_s >= GONE_AFTER_S:
            self._desk.end(session, f"its connection has been gone for {GONE_AFTER_S:.0f} s", is_lost=True)
