"""What can be seen from here of a server that does not answer: who it is, whether it is stopped, what to try; and when the log tells it."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ServerGone
from replay_server_protocol.process import ProcessIdentity

ASK_EVERY_S, TELL_EVERY_S = 2.0, 30.0
log = logging.getLogger("replay_server_client")


class SilenceLog:
    """Tells the log of a server that says nothing while a client waits for it, long before the wait is over; it may have no end.

    ```
    the wait begins ─ 2 s ─┬── 2 s ──┬──── 30 s ────┬─ … ─┬─
                        a question   line           line  an answer: recovered
                           ├─────────── no answer ────────┤
    ```
    Only a question proves a silence: a server with nothing to say is as quiet as one that is stopped. One that answers, every two seconds a
    question, is alive, and tells in its own log why it lets its clients wait. A silence may last over waits that follow each other; after a
    pause in which the client did not wait, an answer may have come and gone, and the server is asked anew. Never waits.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._asked_s = 0.0
        self._is_answered = True
        self._waited_s = 0.0  # the last turn of a wait
        self._told_s: float | None = None

    def wait(self, begun_s: float, ask: Callable[[], None] | None, why: Callable[[], str]) -> bool:
        """In each turn of a wait that has lasted since ``begun_s``, after every message that is there was read. ``ask`` asks what the
        server must answer; None where the wait began with a question. ``why`` is for a line. True if it was asked: read again before you
        sleep."""
        now_s = time.monotonic()
        self._is_answered |= begun_s - self._waited_s > ASK_EVERY_S
        self._waited_s = now_s
        if self._is_answered and ask is not None:
            return self._ask(max(begun_s, self._asked_s), now_s, ask)
        if self._is_answered:
            self._asked_s, self._is_answered = begun_s, False
        patience_s = ASK_EVERY_S if ask is not None else 2 * ASK_EVERY_S
        is_due = self._told_s is None or now_s - self._told_s >= TELL_EVERY_S
        if is_due and now_s - self._asked_s >= patience_s:
            self._told_s = now_s
            silent_s, waited_s = now_s - self._asked_s, now_s - begun_s
            log.warning("%s has had no answer for %.1f s, in a wait of %.1f s: %s", self._who, silent_s, waited_s, why())
        return False

    def heard(self) -> None:
        """The server has said something, or another one has taken its place."""
        self._is_answered = True
        if self._told_s is None:
            return
        self._told_s, now_s = None, time.monotonic()
        if now_s - self._waited_s > ASK_EVERY_S:
            silent_s, idle_s = self._waited_s - self._asked_s, now_s - self._waited_s
            log.warning("%s recovered: it had no answer for %.1f s, and did not wait for the %.1f s since", self._who, silent_s, idle_s)
        else:
            log.warning("%s recovered after %.1f s without an answer", self._who, now_s - self._asked_s)

    def _ask(self, since_s: float, now_s: float, ask: Callable[[], None]) -> bool:
        if now_s - since_s < ASK_EVERY_S:
            return False
        self._asked_s, self._is_answered = now_s, False
        with contextlib.suppress(ServerGone):  # the wait's next turn meets it
            ask()
        return True


def why_nobody_answers(endpoints: Endpoints, waited_s: float) -> str:
    """Of a name that a client can't connect to: there is no such server, it took its directory along, or it is stopped or busy."""
    holder = _holder_of(endpoints)
    if holder is not None and holder.is_alive():
        return f"{why_silent(endpoints.name, holder)} (for {waited_s:.1f} s, in {endpoints.run_dir})"
    nobody = f"no server called {endpoints.name!r} answered in {endpoints.run_dir} for {waited_s:.1f} s"
    start = f"start one with: replay-server serve --name {endpoints.name} --run-dir {endpoints.run_dir}"
    has_directory = endpoints.run_dir.is_dir()
    if endpoints.is_spawned:
        also = "" if has_directory else ", and its run directory with it"
        return (
            f"{nobody}: that server has ended{also}. ReplayServer.spawn() ends it with its with block and its script: use clients before "
            "that, or spawn(keep=True); if it ended by itself, log_lines() of what it returned tells why"
        )
    return f"{nobody}{'' if has_directory else ': there is no such directory'}; {start}"


def is_held(endpoints: Endpoints) -> bool:
    """Whether a living process holds the name, as its lock file says; cheap where there is none."""
    holder = _holder_of(endpoints)
    return holder is not None and holder.is_alive()


def why_silent(name: str, server: ProcessIdentity) -> str:
    """Of a server that a client is attached to."""
    if server.is_stopped():
        return f"server {name!r} (pid {server.pid}) does not answer, its process is stopped: continue it with kill -CONT {server.pid}"
    return f"server {name!r} (pid {server.pid}) does not answer: it may be busy, or its machine is; see top, and its log"


def _holder_of(endpoints: Endpoints) -> ProcessIdentity | None:
    """Who holds the name, as its lock file says; None when that says nothing."""
    try:
        record = json.loads(endpoints.lock_path.read_bytes()[:65536])
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict):
        return None
    pid, start_ticks = record.get("pid"), record.get("start_ticks")
    return ProcessIdentity(pid, start_ticks) if isinstance(pid, int) and isinstance(start_ticks, int) and start_ticks > 0 else None
