"""Who drives a learner's conversation, and when: its background thread, or the caller, never both.

```
                         ┌─────────────── advance ───────────────┐
 background thread  ──►  │ read until empty → requesters move on │ ──► sleep outside the lock (message, wake, nap)
 or the caller      ──►  └── again, while something was sent ────┘
```

While the caller waits in ``drive``, the background thread is parked; the first ``progress()`` ends it for good. One lock guards the
conversation and every batch buffer that is neither ready nor lent; those belong to the caller's thread. Nobody sleeps or attaches under
the lock (but for a ring's handle that the driver won't open at once, see mapping_cuda.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping

from replay_server_protocol.errors import InvalidRequest, ReplayError, ServerGone
from replay_server_protocol.process import spin_s
from replay_server_protocol.schema import Schema

from replay_server_client.connection import Connection
from replay_server_client.conversation import AT_REST_S, IDLE_NAP_S, Conversation, R
from replay_server_client.deadline import Deadline
from replay_server_client.mapping import is_for_one_thread
from replay_server_client.proven_ring import ProvenRing
from replay_server_client.side_stream import SideStreams
from replay_server_client.wake import Wake

_SHORT_NAP_S = 0.001
"""Naps up to here only wait for the GPU; longer ones also for messages (poll counts in milliseconds)."""
_EXPLAIN_S = (0.015, 0.25)
"""Least and most time to wait for a reason; between them a twentieth of the wait that it explains: half of what a timeout may be late."""
_ABANDON_S = 1.0


class Engine:
    """Drives one conversation. ``attached`` counts sessions."""

    def __init__(
        self, connection: Connection, device: str, expected: Schema | None, *, reattaches: bool = True, require_zero_copy: bool = False
    ) -> None:
        self.connection = connection
        self.conversation = Conversation(connection, ProvenRing(connection, device, expected, require_zero_copy=require_zero_copy))
        self.attached = 0
        self._reattaches = reattaches
        self._pid = os.getpid()
        self._is_for_one_thread = is_for_one_thread(device)
        self._only_thread = 0
        self._failure: Exception | None = None  # met by the background thread, raised once by the next call
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)  # never entered itself: Ctrl-C inside its __enter__ would leave the lock held for ever
        self._is_driven_by_caller = False
        self.side_streams = SideStreams()
        self._is_closed = False
        self._spin_s = spin_s()
        self._is_abandoned = False
        self._thread: threading.Thread | None = None
        self._wake = Wake()

    def open(self, timeout: float | None) -> None:
        """Attaches and starts the background thread; closes where it can't, also for a ``timeout`` that is refused."""
        try:
            self.attach(Deadline(timeout))
            self.start()
        except BaseException:
            self.close()
            raise

    def attach(self, deadline: Deadline) -> None:
        """Opens a session; waits for a server until the deadline. Called by the caller's thread only, while no other drives."""
        with self._lock:
            self.conversation.let_go()
        self.connection.attach(deadline)
        self.attached += 1

    def start(self) -> None:
        """Starts the background thread, unless the device is for one thread: that is the first to drive, and no other may."""
        if self._is_for_one_thread:
            return
        self._thread = threading.Thread(target=self._run, name="replay-learner", daemon=True)
        self._thread.start()

    def register(self, make: Callable[[int], R], ordinal: int | None = None) -> R:
        with self._lock:
            return self.conversation.register(make, ordinal)

    @property
    def has_thread(self) -> bool:
        """Whether a background thread drives: it ends with the first ``progress()``."""
        return self._thread is not None

    def wake(self, begin_ns: int = 0, next_ns: int = 0) -> None:
        """Tells the background thread that the caller changed something, to be looked at from ``begin_ns`` on, or when a message comes.
        What it changes next can wait until ``next_ns``; 0 where that isn't known.

        Costs a microsecond, and where the thread has to be woken ten; never waits.
        """
        if self._thread is not None:
            self._wake.ring(begin_ns, next_ns)

    def progress(self) -> None:
        """Advances without waiting; what is granted of a ring in host memory is gathered here.

        The first call ends the background thread: from then on only the caller drives.
        A lost server is noticed here and attached to again by the next call that may wait.
        """
        self._check_thread()
        self._end_thread()
        try:
            while True:
                with self._lock:
                    self.conversation.advance()
                    work = self.conversation.claim()
                if work is None:
                    return
                work()
        except BaseException as error:
            self._interrupted_by(error)
            raise

    def act(self, action: Callable[[], None]) -> None:
        """Does ``action`` under the lock and sends what follows from it; the background thread gathers what was granted."""
        self._check_thread()
        try:
            with self._lock:
                action()
                self.conversation.advance()
                is_at_work = self.conversation.nap_s() <= _SHORT_NAP_S
            if is_at_work:  # no message will tell the thread of it; its rest, if it has one, goes on
                self.wake(self._wake.begin_ns, self._wake.next_ns)
        except BaseException as error:
            self._interrupted_by(error)
            raise

    def drive(self, is_done: Callable[[], bool], deadline: Deadline) -> bool:
        """Advances until ``is_done()`` (asked under the lock), attaching again if the server was lost. False at the deadline.

        Raises what the background thread met, ServerClosing when the server said so, ServerGone when none answers until the deadline.
        """
        self._check_thread()
        with self.connection.waiting():
            return self._drive(is_done, deadline)

    def post(self, name: str, arrays: Mapping[str, object], deadline: Deadline) -> int | None:
        """Posts to a mailbox and returns the version, None at the deadline."""
        version: int | None = None

        def is_posted() -> bool:
            nonlocal version
            version = self.conversation.posted(name, arrays)
            return version is not None

        self.act(self.conversation.begin_post)
        self.drive(is_posted, deadline)
        return version

    def explain(self, sampler: int, number: int, waited: Deadline) -> str:
        """What the server says this learner waits for. Waits for the answer a twentieth of the time ``waited``, within _EXPLAIN_S."""
        least_s, most_s = _EXPLAIN_S
        conversation = self.conversation
        with self._lock:
            conversation.ask_reason(sampler, number)
        self.drive(lambda: conversation.reason is not None, Deadline(min(max(waited.elapsed_s / 20, least_s), most_s)))
        return conversation.reason or self.connection.why_silent()

    def close(self) -> None:
        """Unmaps, says BYE, ends the thread. In a forked child it does nothing. Safe to call twice."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        self._end_thread()
        with self._lock:
            self.conversation.let_go()
            self.side_streams.give_back()
            self.connection.close()
        self._wake.close()

    def abandon(self) -> None:
        """Closes because nobody holds the learner any more. Garbage is collected in any thread and in the middle of anything: in the
        background thread, or where this thread holds the lock, closing is left to the background thread."""
        thread, self._is_abandoned = self._thread, True
        if os.getpid() != self._pid or threading.current_thread() is thread:
            return
        if self._lock.acquire(timeout=_ABANDON_S):
            self._lock.release()
            self.close()
            if thread is not None:
                thread.join(_ABANDON_S)  # where it saw first that it is abandoned, it is the one that closes

    def _drive(self, is_done: Callable[[], bool], deadline: Deadline) -> bool:
        self._park_thread()
        begun_s = time.monotonic()
        spin_until_s = begun_s + self._spin_s
        try:
            while True:
                self._raise_failure()
                if not self.connection.is_attached:
                    if not self._reattaches:
                        raise ServerGone(self.connection.why_silent())
                    self.attach(deadline)
                with self._lock:
                    self.conversation.advance()
                    if self.connection.silence.wait(begun_s, lambda: self.conversation.ask_reason(0, 0), self.connection.why_silent):
                        self.conversation.advance()
                    is_over = self.connection.is_attached and is_done()
                    is_attached, nap_s = self.connection.is_attached, self.conversation.nap_s()
                    # Without a background thread what is granted is gathered before this returns: its lease would run out meanwhile.
                    work = self.conversation.claim() if not is_over or self._thread is None else None
                    self._turn.notify()  # there may be work for the background thread, too
                if work is not None:
                    work()
                    continue
                if is_over:
                    return True
                if not is_attached:
                    continue
                if deadline.has_passed:
                    return False
                self._sleep(min(nap_s, deadline.remaining_s), spin_until_s)
        except BaseException as error:
            self._interrupted_by(error)
            raise
        finally:
            self._resume_thread()

    def _interrupted_by(self, error: BaseException) -> None:
        """Ctrl-C, or what a signal handler raised, may have come between a message about the ring and what it asks for: nobody says it
        again, so the next call begins anew. Of all later messages the server says the lost one again."""
        if isinstance(error, ReplayError):
            return
        with self._lock:
            if self.connection.is_attached and self.conversation.ring is None:
                self.conversation.let_go()
                self.connection.say_bye()

    def _check_thread(self) -> None:
        self.connection.check_caller()
        if not self._is_for_one_thread:
            return
        thread = threading.get_ident()
        self._only_thread = self._only_thread or thread
        if thread != self._only_thread:
            raise InvalidRequest("a learner on mps belongs to the thread that used it first: call sample() and progress() there")

    def _run(self) -> None:
        is_relaxed = False
        while self._is_mine() and not self._is_abandoned:
            work = None
            with self._lock:
                while self._is_mine() and not self._may_run() and (work := self.conversation.claim()) is None:
                    self._turn.wait(IDLE_NAP_S)
                if not self._is_mine():
                    return
                if not is_relaxed:
                    is_relaxed = self._relax()
                if work is None:
                    self._wake.listen()
                    try:
                        self.conversation.advance()
                        work = self.conversation.claim()
                    except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to: the next call raises it
                        self._failure = error
                nap_s = self.conversation.nap_s()
            if work is not None:
                work()
            else:
                self._doze(nap_s)
        if self._is_abandoned:
            self.close()

    def _is_mine(self) -> bool:
        return self._thread is threading.current_thread()

    def _may_run(self) -> bool:
        """The background thread rests while the caller drives, and until a call has raised a failure or found a server again."""
        is_resting = self._is_driven_by_caller or self._failure is not None or not self.connection.is_attached
        return self._is_abandoned or not is_resting

    def _relax(self) -> bool:
        """Lets this thread use CUDA while the caller captures a graph. False while it isn't known whether CUDA will be used."""
        ring = self.conversation.ring
        if ring is not None and ring.device.type == "cuda":
            with contextlib.suppress(ImportError):  # a ring in host memory needs no cuda-bindings
                from replay_server_client.mapping_cuda import relax_capture_mode

                relax_capture_mode()
        return ring is not None

    def _sleep(self, nap_s: float, spin_until_s: float) -> None:
        """The caller's: until a message may be there, or for a nap while the GPU works; until ``spin_until_s`` without really sleeping."""
        spin_s = max(0.0, spin_until_s - time.monotonic())
        if nap_s <= _SHORT_NAP_S:
            time.sleep(0.0 if spin_s else nap_s)
        else:
            self.connection.sleep(nap_s, spin_s=spin_s)

    def _doze(self, nap_s: float) -> None:
        """The background thread's: until a message or the bell, or until what the caller does next may concern it; then on where the
        caller has just been lent a batch, and needs the interpreter more."""
        if nap_s <= _SHORT_NAP_S:
            time.sleep(nap_s)
            return
        next_ns = self._wake.next_ns if nap_s == AT_REST_S else 0
        if next_ns > time.monotonic_ns():
            self._wake.listen(next_ns)
            self._rest_until(next_ns)
        else:
            self.connection.sleep(nap_s, (self._wake.fd,))
        self._wake.hush()
        self._rest_until(self._wake.begin_ns)

    def _rest_until(self, end_ns: int) -> None:
        """Or until a message or the bell; never longer: a poll rounds up. Of the last millisecond nothing is heard."""
        rest_s = (end_ns - time.monotonic_ns()) / 1e9
        if rest_s > _SHORT_NAP_S:
            self.connection.sleep(int(rest_s * 1000) / 1000, (self._wake.fd,))
        elif rest_s > 0:
            time.sleep(rest_s)

    def _raise_failure(self) -> None:
        if self._is_closed:
            raise ServerGone("this learner was closed; connect again")
        conversation = self.conversation
        failure: Exception | None = self._failure or conversation.closing
        self._failure = conversation.closing = None
        if failure is not None:
            raise failure

    def _park_thread(self) -> None:
        with self._lock:
            self._is_driven_by_caller = True

    def _resume_thread(self) -> None:
        with self._lock:
            self._is_driven_by_caller = False
            self._turn.notify()
        self.wake()  # its nap was chosen before the caller drove

    def _end_thread(self) -> None:
        thread = self._thread
        if thread is None:
            return
        with self._lock:
            self._thread = None
            self._turn.notify()
        self._wake.ring()
        if thread is not threading.current_thread():
            thread.join()
