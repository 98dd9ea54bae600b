"""The engine of a learner's session: whoever drives it reads the socket, moves every sampler's batch buffers on, and sends what follows.

```
                         ┌────────────── advance ──────────────┐
 background thread  ──►  │ read until empty → samplers move on │ ──► sleep outside the lock (message, wake, nap)
 or the caller      ──►  └── again, while something was sent ──┘
```

Two threads may drive it, never both: while the caller waits in ``drive``, the background thread is parked; the first ``progress()``
ends it for good. One lock guards everything here and every batch buffer that is neither ready nor lent; those belong to the caller's
thread. Nobody sleeps or attaches under the lock.

The socket's descriptor tells of changes, not of contents, and sending may use a change up: a round ends only when the socket was read
empty after the last send.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from replay_server_protocol.errors import ProtocolViolation, ServerClosing, ServerGone
from replay_server_protocol.messages import Challenge, Explain, Grant, Hello, Proof, Proved, Reason, Refused, RingAt, Sample, ServerMessage
from replay_server_protocol.schema import Schema

from replay_server_client.connection import Connection, error_of
from replay_server_client.deadline import Deadline
from replay_server_client.mailbox import MailPoster
from replay_server_client.mapping import Ring
from replay_server_client.proven_ring import ProvenRing
from replay_server_client.wake import Wake

_IDLE_NAP_S = 0.5
_SHORT_NAP_S = 0.001
"""Naps up to here only wait for the GPU; longer ones also for messages (poll counts in milliseconds)."""
_EXPLAIN_S = (0.015, 0.25)
"""Least and most time to wait for a reason; between them a tenth of the wait that it explains."""
_ABANDON_S = 1.0


R = TypeVar("R", bound="Requester")


class Requester(Protocol):
    """What asks for leases. Every method is called under the engine's lock."""

    def advance(self, now_ns: int) -> bool:
        """Moves on whatever can move without waiting. True if a message was sent."""

    def granted(self, grant: Grant) -> None: ...

    def refused(self, refused: Refused) -> None: ...

    def forget(self) -> None:
        """The ring is about to be unmapped: finish what reads it and drop every view of it."""

    def nap_s(self) -> float:
        """How long the driver may sleep if no message comes."""


class Engine:
    """``ring`` is None until the mapping of this generation's ring is proved, and again once the server is lost."""

    def __init__(self, connection: Connection, device: str, expected: Schema | None) -> None:
        self.connection = connection
        self.poster = MailPoster(connection)
        self.attached = 0
        self._pid = os.getpid()
        self._proven = ProvenRing(connection, device, expected)
        self._requesters: list[Requester] = []
        self._failure: Exception | None = None  # met by the background thread, raised once by the next call
        self._reason: str | None = None
        self._turn = threading.Condition(threading.Lock())
        self._is_driven_by_caller = False
        self._is_closed = False
        self._is_abandoned = False
        self._thread: threading.Thread | None = None
        self._wake = Wake()

    @property
    def ring(self) -> Ring | None:
        return self._proven.ring

    def attach(self, deadline: Deadline) -> None:
        """Opens a session; waits for a server until the deadline. Called by the caller's thread only, while no other drives."""
        with self._turn:
            self._let_go()
        self.connection.attach(deadline)
        self.attached += 1

    def start(self) -> None:
        """Starts the background thread."""
        self._thread = threading.Thread(target=self._run, name="replay-learner", daemon=True)
        self._thread.start()

    def register(self, make: Callable[[int], R]) -> R:
        """Adds the requester that ``make`` builds from its ordinal."""
        with self._turn:
            requester = make(len(self._requesters))
            self._requesters.append(requester)
        return requester

    def wake(self) -> None:
        """Tells the background thread that the caller changed something. Costs a microsecond; never waits."""
        if self._thread is not None:
            self._wake.ring()

    def progress(self) -> None:
        """Advances without waiting. The first call ends the background thread: from then on only the caller drives.

        A lost server is noticed here and attached to again by the next call that may wait.
        """
        self._end_thread()
        with self._turn:
            self.advance()

    def drive(self, is_done: Callable[[], bool], deadline: Deadline) -> bool:
        """Advances until ``is_done()`` (asked under the lock), attaching again if the server was lost. False at the deadline.

        Raises what the background thread met, ServerClosing when the server said so, ServerGone when none answers until the deadline.
        """
        self._park_thread()
        try:
            while True:
                self._raise_failure()
                if not self.connection.is_attached:
                    self.attach(deadline)
                with self._turn:
                    self.advance()
                    if self.connection.is_attached and is_done():
                        return True
                    is_attached, nap_s = self.connection.is_attached, self._nap_s()
                if not is_attached:
                    continue
                if deadline.has_passed:
                    return False
                self._sleep(min(nap_s, deadline.remaining_s))
        finally:
            self._resume_thread()

    def proved_ring(self) -> Ring | None:
        """The ring, or None while there is none. Raises why it can't be mapped. To be asked under the lock."""
        if self._proven.refusal is not None:
            raise self._proven.refusal
        return self.ring

    def post(self, name: str, arrays: Mapping[str, object], deadline: Deadline) -> int | None:
        """Posts to a mailbox and returns the version, None at the deadline; starts again if the server was lost on the way."""
        session = 0

        def is_posted() -> bool:
            nonlocal session
            if session != self.connection.session:
                session = self.connection.session
                self.poster.start(name, arrays)
                self.advance()
            return self.connection.is_attached and self.poster.version is not None

        return self.poster.version if self.drive(is_posted, deadline) else None

    def explain(self, sampler: int, number: int, waited: Deadline) -> str:
        """What the server says this learner waits for. Waits for the answer a tenth of the time ``waited``, within _EXPLAIN_S."""
        ring, self._reason = self.ring, None
        least_s, most_s = _EXPLAIN_S
        with self._turn:
            if not self.connection.is_attached:
                return "the server is gone"
            session, generation = self.connection.session, self.connection.generation
            self.connection.send(Explain(session, generation, "ring" if ring is None else "sample", sampler, number))
        self.drive(lambda: self._reason is not None, Deadline(min(max(waited.elapsed_s / 10, least_s), most_s)))
        return self._reason or ("the server has no ring yet" if ring is None else "the server does not say what is missing")

    def act(self, action: Callable[[], None]) -> None:
        """Does ``action`` under the lock and sends what follows from it."""
        with self._turn:
            action()
            self.advance()

    def advance(self) -> None:
        """One round, under the lock; never waits. A lost server is noted and its ring unmapped."""
        if not self.connection.is_attached:
            return
        try:
            while self._round():
                pass
        except ServerClosing as closing:
            self._let_go()
            self.connection.say_bye()
            self._failure = closing
        except ServerGone:
            self._let_go()

    def close(self) -> None:
        """Unmaps, says BYE, ends the thread. In a forked child it does nothing. Safe to call twice."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        self._end_thread()
        with self._turn:
            self._let_go()
            self.connection.close()
        self._wake.close()

    def abandon(self) -> None:
        """Closes because nobody holds the learner any more. Garbage is collected in any thread and in the middle of anything: in the
        background thread, or where this thread holds the lock, closing is left to the background thread."""
        self._is_abandoned = True
        if os.getpid() != self._pid or threading.current_thread() is self._thread:
            return
        if self._turn.acquire(timeout=_ABANDON_S):
            self._turn.release()
            self.close()

    def _round(self) -> bool:
        while (message := self.connection.receive_nowait()) is not None:
            self._take(message)
        now_ns = time.monotonic_ns()
        has_sent = False
        for requester in self._requesters:
            has_sent |= requester.advance(now_ns)
        return has_sent

    def _take(self, message: ServerMessage) -> None:
        match message:
            case Grant():
                self._requester(message.sampler).granted(message)
            case RingAt():
                self._proven.place(message)
            case Challenge():
                self._proven.prove(2)
            case Proved():
                self._proven.accept()
            case Reason():
                self._reason = message.text
            case Refused() if message.about == Sample.__name__:
                self._requester(message.sampler).refused(message)
            case Refused() if message.about in (Hello.__name__, Proof.__name__):
                self._proven.refusal = error_of(message)
            case _:
                self.poster.accept(message)

    def _let_go(self) -> None:
        for requester in self._requesters:
            requester.forget()
        self._proven.let_go()

    def _requester(self, ordinal: int) -> Requester:
        if ordinal >= len(self._requesters):
            raise ProtocolViolation(f"the server answers sampler {ordinal}, this learner has {len(self._requesters)}")
        return self._requesters[ordinal]

    def _run(self) -> None:
        is_relaxed = False
        while self._is_mine() and not self._is_abandoned:
            with self._turn:
                while self._is_mine() and not self._may_run():
                    self._turn.wait(_IDLE_NAP_S)
                if not self._is_mine():
                    return
                if not is_relaxed and self.ring is not None and self.ring.stream is not None:
                    is_relaxed = _relax_capture_mode()
                try:
                    self.advance()
                except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to: the next call raises it
                    self._failure = error
                nap_s = self._nap_s()
            self._sleep(nap_s, self._wake.fd)
        if self._is_abandoned:
            self.close()

    def _is_mine(self) -> bool:
        return self._thread is threading.current_thread()

    def _may_run(self) -> bool:
        """The background thread rests while the caller drives, and until a call has raised a failure or found a server again."""
        is_resting = self._is_driven_by_caller or self._failure is not None or not self.connection.is_attached
        return self._is_abandoned or not is_resting

    def _nap_s(self) -> float:
        if not self.connection.is_attached:
            return _IDLE_NAP_S
        return min((requester.nap_s() for requester in self._requesters), default=_IDLE_NAP_S)

    def _sleep(self, nap_s: float, *also: int) -> None:
        if nap_s <= _SHORT_NAP_S:
            time.sleep(nap_s)
            return
        self.connection.sleep(nap_s, also)
        if also:
            self._wake.hush()

    def _raise_failure(self) -> None:
        if self._is_closed:
            raise ServerGone("this learner was closed; connect again")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _park_thread(self) -> None:
        with self._turn:
            self._is_driven_by_caller = True

    def _resume_thread(self) -> None:
        with self._turn:
            self._is_driven_by_caller = False
            self._turn.notify()
        self.wake()  # its nap was chosen before the caller drove

    def _end_thread(self) -> None:
        thread = self._thread
        if thread is None:
            return
        with self._turn:
            self._thread = None
            self._turn.notify()
        self._wake.ring()
        if thread is not threading.current_thread():
            thread.join()


def _relax_capture_mode() -> bool:
    with contextlib.suppress(ImportError):
        from replay_server_client.mapping_cuda import relax_capture_mode

        relax_capture_mode()
    return True
