"""The observer: a session that looks at rows and touches nothing: outside flow control, counted nowhere, with no torch for a host ring."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
from replay_server_protocol.endpoints import check_name
from replay_server_protocol.errors import InvalidRequest, ReplayError, ReplayTimeout, ServerGone, shown
from replay_server_protocol.messages import Capture, Captured, Explain, Grant, Reason
from replay_server_protocol.schema import Schema

from replay_server_client import look
from replay_server_client.bounce import Bounce
from replay_server_client.connection import Connection
from replay_server_client.deadline import Deadline
from replay_server_client.hello import attached, hello_of
from replay_server_client.lease_requests import LeaseRequests
from replay_server_client.look import CopiedRows, Ring, Rows, Selection, T
from replay_server_client.look_episode import episode_seqs
from replay_server_client.observed_ring import ObservedRing

_ASK_AGAIN_S = 1.0


class Observer:
    """Looks at the window of a running server. For one thread at a time: another one that calls meanwhile is refused by InvalidRequest.

    Rows are copied under leases that last for one copy of a few megabytes. A lost server is attached to again by the next call.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._observed = ObservedRing(connection)
        self._pid = os.getpid()
        self._leases = _Leases(connection, self._observed)

    @classmethod
    def connect(
        cls,
        server: str | None = None,
        *,
        name: str = "observer",
        run_dir: str | os.PathLike[str] | None = None,
        timeout: float | None = 10.0,
        run_id: str | None = None,
    ) -> Self:
        """Attaches; returns as soon as the server answers, before there is a ring.

        Raises ServerGone when none answers within ``timeout`` seconds, AttachRefused when it refuses (``run_id`` is not its own).
        """
        check_name(name, "observer name")
        if run_id is not None:
            check_name(run_id, "run_id")
        return cls(attached(server, run_dir, partial(hello_of, "observer", name, run_id=run_id), timeout, f"observer {name}"))

    def schema(self, timeout: float | None = 5.0) -> Schema:
        """The ring's schema. Waits for the ring."""
        return self._leases.ring(Deadline(timeout)).schema

    def ring(self, timeout: float | None = 5.0) -> Ring:
        """Where the rows and side columns lie, and the schema. Waits for the ring."""
        return self._leases.ring(Deadline(timeout))

    def window(self, timeout: float | None = 5.0) -> tuple[int, int]:
        """(tail, committed): the seqs that can be looked at now."""
        with self._connection.calling():
            return look.window(self._leases, Deadline(timeout))

    def read(
        self,
        *,
        newest: int | None = None,
        seqs: Selection | None = None,
        episode_of: int | None = None,
        fields: Sequence[str] | None = None,
        timeout: float | None = 30.0,
    ) -> Rows:
        """Copies of the ``newest`` k rows (fewer if there are fewer), of the rows ``seqs``, or of the episode that row ``episode_of``
        belongs to (``serve --columns link``). ``fields`` leaves out others.

        Rows overwritten before their turn to be copied are left out and named in ``overtaken``. Raises InvalidRequest naming the seqs
        that are not in the window, ReplayTimeout, ServerGone.
        """
        with self._connection.calling():
            return look_at(self._leases, newest, seqs, episode_of, fields, Deadline(timeout))

    def chunks(self, rows: int | None = None, *, seqs: Selection | None = None, timeout: float | None = None) -> Iterator[CopiedRows]:
        """The whole window as it is now (or ``seqs``), oldest row first, at most ``rows`` rows at a time, as the ring holds them.

        A chunk's arrays are views of the one bounce buffer, valid until the next chunk or other call. Rows overtaken by ingest are named in
        each.
        """
        if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
            raise InvalidRequest(f"rows={shown(rows)}: rows of a chunk, at least 1")
        deadline = Deadline(timeout)
        bounds = look.window(self._leases, deadline)
        asked = np.arange(*bounds) if seqs is None else look.chosen_seqs(bounds, None, seqs)
        return look.chunks(self._leases, asked, deadline, rows)

    def copies(self, first_seq: int, end_seq: int, *, timeout: float | None = None) -> Iterator[CopiedRows]:
        """As ``chunks``, of the rows [first_seq, end_seq): those that have left the window are named in ``overtaken``, none is refused."""
        return look.chunks(self._leases, np.arange(first_seq, end_seq), Deadline(timeout))

    def capture(self, timeout: float | None = 10.0) -> Captured:
        """The window and what the server keeps beside the ring, both of one moment. Waits for the ring."""
        return self._leases.capture(Deadline(timeout))

    def close(self) -> None:
        """Unmaps the ring and says BYE. Safe to call twice. Raises InvalidRequest while another thread is in a call, and stays as it is. In
        a forked child it does nothing."""
        if os.getpid() != self._pid:
            return
        self._connection.turn.check()
        self._observed.let_go()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def look_at(
    source: look.LeaseSource,
    newest: int | None,
    seqs: Selection | None,
    episode_of: int | None,
    fields: Sequence[str] | None,
    deadline: Deadline,
) -> Rows:
    """What ``read`` of an observer and of a learner do."""
    if sum(choice is not None for choice in (newest, seqs, episode_of)) != 1:
        raise InvalidRequest("read: exactly one of newest=, seqs= and episode_of=")
    bounds = look.window(source, deadline)
    if episode_of is not None:
        (seq,) = look.chosen_seqs(bounds, None, [episode_of])
        chosen = episode_seqs(source, int(seq), bounds, deadline)
    else:
        chosen = look.chosen_seqs(bounds, newest, seqs)
    return look.read(source, chosen, bounds, deadline, fields)


class _Leases:
    """An observer's leases: one at a time."""

    def __init__(self, connection: Connection, observed: ObservedRing) -> None:
        self._connection = connection
        self._observed = observed
        self._asking = LeaseRequests(connection, 0)
        self._number = 0

    def ring(self, deadline: Deadline) -> Ring:
        connection, begun_s = self._connection, time.monotonic()
        try:
            with connection.calling():
                while (ring := self._observed.ring) is None:
                    if not connection.is_attached:
                        connection.attach(deadline)
                    answer = self._receive(min(deadline.remaining_s, _ASK_AGAIN_S))
                    connection.silence.wait(begun_s, self._ask_reason, connection.why_silent)
                    if answer is None and deadline.has_passed:
                        raise ReplayTimeout(f"there is no ring to look at after {deadline.elapsed_s:.2f} s: {self._reason()}")
        except ReplayError:
            raise
        except BaseException:  # Ctrl-C, perhaps between a message about the ring and what it asks for: the next call begins anew
            self._observed.let_go()
            self._connection.say_bye()
            raise
        return ring

    def under_lease(self, work: Callable[[Grant, Bounce], T], deadline: Deadline) -> T | None:
        with self._connection.calling():
            return self._under_lease(work, deadline)

    def capture(self, deadline: Deadline) -> Captured:
        with self._connection.calling():
            return self._capture(deadline)

    def _under_lease(self, work: Callable[[Grant, Bounce], T], deadline: Deadline) -> T | None:
        self.ring(deadline)
        grant = self._granted(deadline)
        bounce = self._observed.bounce
        if grant is None or bounce is None:
            return None
        try:
            done = work(grant, bounce)
            is_in_time = time.monotonic_ns() <= grant.deadline_ns  # after the copy was seen complete: the order makes it safe
        finally:
            if self._connection.is_attached:
                self._asking.release(grant, is_used=True)
        return done if is_in_time else None

    def _capture(self, deadline: Deadline) -> Captured:
        generation = self.ring(deadline).at.generation
        self._number += 1
        connection, begun_s = self._connection, time.monotonic()

        def ask() -> None:
            connection.send(Capture(connection.session, connection.generation, self._number))

        while not deadline.has_passed:
            ask()
            asked_until = Deadline(min(deadline.remaining_s, _ASK_AGAIN_S))
            while not asked_until.has_passed:
                answer = self._receive(asked_until.remaining_s)
                if isinstance(answer, Captured) and answer.number == self._number:
                    return answer
                if not connection.is_attached:
                    raise ServerGone(f"server {connection.endpoints.name!r} of generation {generation} ended before it told its state")
            connection.silence.wait(begun_s, ask, connection.why_silent)
        raise ReplayTimeout(f"no state of the server after {deadline.elapsed_s:.2f} s: {connection.why_silent()}")

    def _granted(self, deadline: Deadline) -> Grant | None:
        """A lease; None when the server was lost."""
        self._number += 1
        connection, begun_s = self._connection, time.monotonic()
        while True:
            self._asking.observe(self._number)
            asked_until = Deadline(min(deadline.remaining_s, _ASK_AGAIN_S))
            while True:
                answer = self._receive(asked_until.remaining_s)
                if self._observed.ring is None:
                    return None
                if isinstance(answer, Grant) and answer.number == self._number:
                    return answer
                if isinstance(answer, Grant):  # of an earlier question, asked twice
                    self._asking.release(answer, is_used=True)
                if answer is None and asked_until.has_passed:
                    break
            connection.silence.wait(begun_s, partial(self._asking.observe, self._number), connection.why_silent)
            if deadline.has_passed:
                raise ReplayTimeout(f"no lease to look after {deadline.elapsed_s:.2f} s: {connection.why_silent()}")

    def _receive(self, timeout_s: float) -> object:
        """The next message; None also where the server was lost, whose ring is unmapped then."""
        try:
            return self._observed.receive(timeout_s)
        except ServerGone:
            if self._observed.lose():
                raise
            return None

    def _reason(self) -> str:
        connection = self._connection
        if not connection.is_attached:
            return connection.why_silent()
        self._ask_reason()
        waited = Deadline(0.25)
        while not waited.has_passed:
            answer = self._receive(waited.remaining_s)
            if isinstance(answer, Reason):
                return answer.text
        return connection.why_silent()

    def _ask_reason(self) -> None:
        connection = self._connection
        connection.send(Explain(connection.session, connection.generation, "ring", 0, 0))
