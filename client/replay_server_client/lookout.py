"""A learner's own leases to look at rows: asked for in its conversation, copied under its lock, counted nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from replay_server_protocol.errors import ReplayError, ReplayTimeout
from replay_server_protocol.messages import Grant, Refused

from replay_server_client.bounce import Bounce, HostBounce, bounce_bytes
from replay_server_client.connection import error_of
from replay_server_client.conversation import ASK_AGAIN_NS, AT_REST_S, IDLE_NAP_S
from replay_server_client.deadline import Deadline
from replay_server_client.engine import Engine
from replay_server_client.lease_requests import LeaseRequests
from replay_server_client.look import Ring, T


class Lookout:
    """A Requester and a LeaseSource: one lease at a time, for the caller's thread.

    The copy runs under the engine's lock, so that the ring is not unmapped under it: the background thread waits a millisecond for it.
    """

    def __init__(self, engine: Engine, ordinal: int) -> None:
        self._engine = engine
        self._leases = LeaseRequests(engine.connection, ordinal)
        self._number = 0
        self._is_wanted = False
        self._asked_ns = 0
        self._grant: Grant | None = None
        self._bounce: Bounce | None = None
        self._error: ReplayError | None = None

    def ring(self, deadline: Deadline) -> Ring:
        conversation = self._engine.conversation
        self._engine.connection.check_process()
        found: Ring | None = None

        def is_there() -> bool:
            nonlocal found
            ring = conversation.proved_ring()
            found = Ring(ring.at, ring.schema) if ring is not None else None
            return found is not None

        self._engine.drive(is_there, deadline)
        if found is None:
            reason = self._engine.explain(self._leases.ordinal, self._number, deadline)
            raise ReplayTimeout(f"there is no ring to look at after {deadline.elapsed_s:.2f} s: {reason}")
        return found

    def under_lease(self, work: Callable[[Grant, Bounce], T], deadline: Deadline) -> T | None:
        done: list[T] = []

        def copy() -> None:
            grant, self._grant = self._grant, None
            if grant is None:
                return  # the server was lost, and its ring with it
            try:
                made = work(grant, self._bounce_of_ring())
                if time.monotonic_ns() <= grant.deadline_ns:  # after the copy was seen complete: the order makes it safe
                    done.append(made)
            finally:
                self._leases.release(grant, is_used=True)

        self._number += 1
        self._grant, self._error, self._asked_ns, self._is_wanted = None, None, 0, True
        try:
            if not self._engine.drive(self._has_grant, deadline):
                raise ReplayTimeout(f"no lease to look after {deadline.elapsed_s:.2f} s: {self._engine.connection.why_silent()}")
            self._engine.act(copy)
        finally:
            self._is_wanted = False
        return done[0] if done else None

    def advance(self, now_ns: int) -> bool:
        if not self._is_wanted or self._grant is not None or self._error is not None or now_ns - self._asked_ns < ASK_AGAIN_NS:
            return False
        self._asked_ns = now_ns
        self._leases.observe(self._number)
        return True

    def granted(self, grant: Grant) -> None:
        if self._is_wanted and grant.number == self._number:
            self._grant = grant
        else:
            self._leases.release(grant, is_used=True)

    def refused(self, refused: Refused) -> None:
        self._error = error_of(refused)

    def claim(self) -> None:
        return None

    def forget(self) -> None:
        if self._bounce is not None:
            self._bounce.finish()  # a look may have ended in the middle
        self._grant, self._bounce, self._asked_ns = None, None, 0

    def nap_s(self) -> float:
        return IDLE_NAP_S if self._is_wanted else AT_REST_S

    def _has_grant(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._grant is not None

    def _bounce_of_ring(self) -> Bounce:
        """Made at the first look, as large as ever needed, and kept while the ring is mapped."""
        ring = self._engine.conversation.ring
        if self._bounce is None and ring is not None:
            n_bytes, allocation = bounce_bytes(Ring(ring.at, ring.schema).record_bytes), ring.mapping.allocation
            if allocation.is_cuda:
                from replay_server_client.bounce_cuda import CudaBounce

                self._bounce = CudaBounce(allocation, n_bytes)
            else:
                self._bounce = HostBounce(allocation.numpy(), n_bytes)
        if self._bounce is None:
            raise ReplayError("the ring was unmapped under a grant")
        return self._bounce
