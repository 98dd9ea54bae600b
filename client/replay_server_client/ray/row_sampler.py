"""Uniform rows of a ring in host memory, with no torch and no more than are asked for: what a host answers other nodes' learners.

A learner session: its rows count as sampled and wait for samples per insert, as any learner's do. Each draw is made under a lease:

```
SAMPLE k ─► GRANT [tail, committed) ─► k seqs, uniform with replacement ─► copied ─► clock <= deadline? ─► RELEASE
```
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ReplayTimeout, ServerGone
from replay_server_protocol.messages import Grant

from replay_server_client.bounce import Bounce
from replay_server_client.connection import Connection
from replay_server_client.deadline import Deadline
from replay_server_client.hello import hello_of
from replay_server_client.lease_requests import LeaseRequests
from replay_server_client.look import Ring, copy_rows
from replay_server_client.observed_ring import ObservedRing
from replay_server_client.ray.parcel import Drawn

_LATE_IN_A_ROW = 3
_ASK_AGAIN_S = 1.0


class RowSampler:
    """For one thread at a time. A lost sidecar is attached to again by the next call."""

    def __init__(self, endpoints: Endpoints, name: str) -> None:
        """Attaches with the first call."""
        self._connection = Connection(endpoints, partial(hello_of, "learner", name))
        self._observed = ObservedRing(self._connection)
        self._leases = LeaseRequests(self._connection, 0)
        self._number = 0

    def draw(self, n: int, key: Sequence[int], timeout_s: float) -> Drawn:
        """``n`` rows; of equal windows and ``key`` the same ones.

        Raises ServerGone when the sidecar ended, ReplayTimeout naming what was missing, and what it refuses."""
        deadline = Deadline(timeout_s)
        for _ in range(_LATE_IN_A_ROW):
            drawn = self._draw(n, key, self._ring(deadline), deadline)
            if drawn is not None:
                return drawn
        raise ReplayTimeout(f"{_LATE_IN_A_ROW} copies in a row took longer than their lease: serve with a longer --lease")

    def close(self) -> None:
        self._observed.let_go()
        self._connection.close()

    def _ring(self, deadline: Deadline) -> Ring:
        connection = self._connection
        while (ring := self._observed.ring) is None:
            if not connection.is_attached:
                connection.attach(deadline)
            self._receive(min(deadline.remaining_s, _ASK_AGAIN_S))
            if deadline.has_passed and self._observed.ring is None:
                raise ReplayTimeout(f"server {connection.endpoints.name!r} has no ring after {deadline.elapsed_s:.2f} s: no rows came yet")
        return ring

    def _draw(self, n: int, key: Sequence[int], ring: Ring, deadline: Deadline) -> Drawn | None:
        """None when the copy ended after its lease."""
        grant, bounce = self._granted(n, deadline), self._observed.bounce
        assert bounce is not None  # the ring is proved
        is_in_time = False
        try:
            drawn = self._copied(n, key, ring, grant, bounce)
            is_in_time = time.monotonic_ns() <= grant.deadline_ns  # after the copy was complete: the order makes it safe
        finally:
            if self._connection.is_attached:
                self._leases.release(grant, is_used=is_in_time)
        return drawn if is_in_time else None

    def _copied(self, n: int, key: Sequence[int], ring: Ring, grant: Grant, bounce: Bounce) -> Drawn:
        size_rows = grant.committed - grant.tail
        seqs = np.random.default_rng([part % 2**64 for part in key]).integers(grant.tail, grant.committed, n)
        most = len(bounce.memory) // ring.record_bytes
        pieces = [copy_rows(ring, seqs[begin : begin + most], grant, bounce).newest_rows() for begin in range(0, n, most)]
        rows = pieces[0] if len(pieces) == 1 else np.concatenate([np.empty((0, ring.schema.stride), np.uint8), *pieces])
        results = {"seqs": seqs, "indices": seqs % ring.at.ring_rows}
        return Drawn(rows, results, ring.schema.to_wire(), grant.generation, size_rows)

    def _granted(self, n: int, deadline: Deadline) -> Grant:
        self._number += 1
        asked_s = -_ASK_AGAIN_S
        while True:
            if time.monotonic() - asked_s >= _ASK_AGAIN_S:
                asked_s = time.monotonic()
                self._leases.ask(self._number, n)
            answer = self._receive(min(deadline.remaining_s, _ASK_AGAIN_S))
            if isinstance(answer, Grant) and answer.number == self._number:
                return answer
            if isinstance(answer, Grant):  # of a question that was given up
                self._leases.release(answer, is_used=False)
            if deadline.has_passed:
                self._leases.cancel(self._number)
                raise ReplayTimeout(f"{n} rows were not granted after {deadline.elapsed_s:.2f} s: {self._connection.why_silent()}")

    def _receive(self, timeout_s: float) -> object:
        """The next message. A lost server's ring is unmapped."""
        try:
            return self._observed.receive(timeout_s)
        except ServerGone:
            self._observed.lose()
            raise
