"""The batch buffers of one request: asked for, gathered and handed in before the caller wants them.

```
        REQUESTED ──grant──► GATHERING ──seen complete by the deadline──► READY ──take──► LENT
           ▲                     │ late: asked again                        │ stale       │ next sample()
           └────── FREE ◄────────┴──────────────────────────────────────────┘             ▼
                    ▲──────────────────── caller's queued work done ───────────────── RETURNING
```

Batch buffers take turns: buffer i holds the batches i + 1, i + 1 + period, …, period = prefetch + 1. So addresses repeat with that
period, and a batch that is dropped is asked for again with its number, into its buffer: the same rows come out of the same window.

A batch is handed out only after the host saw its gather complete and then read a clock at or before the lease's deadline: until then
the ring did not change under it. Ready and lent batch buffers belong to the caller's thread, which takes a ready one without a lock;
all others belong to the holder of the engine's lock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replay_server_protocol.errors import InvalidRequest, ProtocolViolation, ReplayError, ReplayTimeout, ServerGone
from replay_server_protocol.messages import Grant, Refused
from replay_server_protocol.states import BufferEvent, BufferState

from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.compiled import HowToRun, plain
from replay_server_client.connection import error_of
from replay_server_client.conversation import ASK_AGAIN_NS, AT_REST_S, IDLE_NAP_S
from replay_server_client.deadline import Deadline
from replay_server_client.draw import Parameters
from replay_server_client.gather import Work, make_gather
from replay_server_client.head_start import HeadStart
from replay_server_client.lease_requests import LeaseRequests
from replay_server_client.place import Place
from replay_server_client.request import Request, Seeds

if TYPE_CHECKING:
    from replay_server_client.engine import Engine
    from replay_server_client.mapping import Ring

_MOST_LATE = 3
_GATHER_NAP_S = 50e-6
_RETURN_NAP_S = 200e-6
_READY = BufferState.READY
_CALLERS = {BufferState.READY, BufferState.LENT}
_ALPHA, _BETA = 0.6, 0.4
"""Of Schaul et al. 2016, section 4, proportional variant."""
_REQUESTS, _GATHERS = "requests", "gathers"


@dataclass(slots=True)
class Counters:
    """What one sampler has done. ``dropped`` batches were asked for again; ``late`` ones are among them."""

    batches: int = 0
    dropped: int = 0
    late: int = 0
    waited_s: float = 0.0


class Prefetch:
    """A Requester. All its methods are called under the engine's lock, but those that say that they are the caller's."""

    def __init__(self, engine: Engine, ordinal: int, request: Request, seeds: Seeds, prefetch: int, how: HowToRun = plain) -> None:
        self.request = request
        self.counters = Counters()
        self.head_start = HeadStart()
        self.counted_rows = request.rows  # of each batch, as samples per insert counts
        self.exponents = (_ALPHA, _BETA)  # of the draws to come
        self.places: list[Place] = []
        self.ring: Ring | None = None
        self._how = how
        self._engine = engine
        self._leases = LeaseRequests(engine.connection, ordinal)
        self._seeds = seeds
        self._period = prefetch + 1
        self._kind: tuple[object, ...] = ()
        self._turn = 0
        self._min_committed = 0  # what the waiting call asks for
        self._expected = 0  # what every batch still to come must reach
        self._committed = 0  # the newest that a grant told of
        self._is_waited_for = False
        self._late_in_a_row = 0
        self._error: ReplayError | None = None

    # The caller's thread, without the lock

    @property
    def next_place(self) -> Place | None:
        """The place whose turn it is; None before the first ring."""
        return self.places[self._turn] if self.places else None

    def ready(self, min_committed: int) -> Place | None:
        """The turn's place if its batch is ready and new enough."""
        if self.ring is None:
            return None
        place = self.places[self._turn]
        return place if place.state is _READY and place.committed >= min_committed else None

    def pass_turn(self, place: Place) -> None:
        """Its batch is lent: the next one's turn comes."""
        place.happen(BufferEvent.TAKE)
        place.number += self._period
        self._turn = (self._turn + 1) % self._period
        self.counters.batches += 1

    @contextlib.contextmanager
    def waited_for(self, min_committed: int) -> Iterator[None]:
        """Inside the block a batch that reaches ``min_committed`` is asked for, also where none is made ready ahead."""
        self._min_committed = min_committed
        self._is_waited_for = True
        try:
            yield
        finally:
            self._is_waited_for = False

    def explain(self, waited: Deadline) -> str:
        """What the server says that the turn's batch waits for. Where none is made ready ahead, its request is taken back."""
        place = self.next_place
        reason = self._engine.explain(self._leases.ordinal, place.number if place else 0, waited)
        if place is not None and self._period == 1:
            self._engine.act(lambda: self._cancel(place))
        return reason

    # Under the engine's lock

    def expect(self, min_committed: int) -> None:
        """Every batch still to come must reach ``min_committed``."""
        self._expected = min_committed
        for place in self.places:
            if place.state is _READY and place.committed < min_committed:
                self._drop_ready(place)
            elif place.state is BufferState.REQUESTED and place.asked_committed < min_committed:
                place.asked_ns = 0

    def is_ready(self) -> bool:
        """Whether the turn's batch may be handed out; sees to it that the right one is under way. For the caller's thread."""
        ring = self._engine.conversation.proved_ring()
        if self._error is not None:
            error, self._error, self._late_in_a_row = self._error, None, 0
            raise error
        if ring is None:
            return False
        if ring is not self.ring:
            self._bind(ring)
        place = self.places[self._turn]
        if place.state is _READY and place.committed < self._wanted:
            self._drop_ready(place)
        if place.state is BufferState.FREE or place.asked_committed != self._wanted:
            place.asked_ns = 0  # ask, or ask again for what this call wants
            self._engine.conversation.advance()
        return place.state is _READY and self.ring is not None and place.committed >= self._wanted

    def advance(self, now_ns: int) -> bool:
        """Hands in what was gathered and asks for what became free: that is the prefetch. True if a message was sent."""
        if self.ring is None:
            return False
        has_sent = False
        for place in self._in_turn():  # what is handed out first is asked for first
            if place.state is BufferState.GATHERING and self._is_complete(place):
                self._hand_in(place)
                has_sent = True
            if place.state is BufferState.RETURNING and place.gather.is_idle():
                place.happen(BufferEvent.IDLE)
            if place.state is BufferState.FREE and self._error is None and (self._period > 1 or self._is_waited_for):
                place.happen(BufferEvent.REQUEST)
                place.asked_ns = 0
            if place.state is BufferState.REQUESTED and now_ns - place.asked_ns >= ASK_AGAIN_NS:
                self._ask(place, now_ns)
                has_sent = True
        return has_sent

    def granted(self, grant: Grant) -> None:
        """Starts the gather, unless the grant is of no use: its place waits for another, or its time is up, or its window is too old."""
        place = next((p for p in self.places if p.number == grant.number), None)
        if place is not None and place.has_had(grant):
            return  # repeated: the request was repeated while the grant was under way
        if place is None or place.state is not BufferState.REQUESTED or self.ring is None:
            self._leases.release(grant, is_used=False)
            return
        place.grant = grant
        if time.monotonic_ns() > grant.deadline_ns or grant.committed < place.asked_committed:
            self._leases.release(grant, is_used=False)
            self.counters.dropped += 1
            place.asked_ns = 0
            return
        if not grant.tail < grant.committed:
            raise ProtocolViolation(f"a grant of the empty window [{grant.tail:,}, {grant.committed:,})")
        key = self._seeds.key(self._engine.connection.attached_welcome.seed, self._leases.ordinal, place.number)
        place.committed = grant.committed
        self._committed = max(self._committed, grant.committed)
        place.submitted_ns = time.monotonic_ns()
        trace = self._engine.connection.trace
        if trace is not None and place.asked_ns:  # 0: it was about to be asked for again
            trace.record(_REQUESTS, "request", place.asked_ns, place.submitted_ns, number=place.number, committed=grant.committed)
        try:
            place.gather.submit(self._parameters(place, key, grant))
        except Exception:
            self._give_up(place)
            raise
        place.happen(BufferEvent.GRANT)  # last: Ctrl-C before it leaves a request, which is asked for again

    def refused(self, refused: Refused) -> None:
        """The next call that has no batch raises it; until then nothing is asked for."""
        self._error = error_of(refused)
        for place in self.places:
            if place.number == refused.number and place.state is BufferState.REQUESTED:
                place.happen(BufferEvent.FORGET)

    def claim(self) -> Work | None:
        """The batch whose turn is next comes first. Where draws read what is written back, one at a time, in the order of their leases."""
        gathering = [place for place in self._in_turn() if place.state is BufferState.GATHERING]
        is_in_order = any(place.memory.write_back.is_kept for place in gathering)
        for place in sorted(gathering, key=lambda place: place.submitted_ns) if is_in_order else gathering:
            if (work := place.gather.claim()) is not None:
                return work
            if is_in_order and place.gather.is_claimed:
                return None
        return None

    def forget(self) -> None:
        """Ready batches stay as they are: they are the caller's, who drops them when it binds to the next ring. Not counted now."""
        self.ring = None
        self._expected = self._committed = 0  # seqs of the next server start anew
        for place in self.places:
            if place.state in (BufferState.REQUESTED, BufferState.GATHERING):
                place.happen(BufferEvent.FORGET)
            elif place.state is _READY:
                with contextlib.suppress(ServerGone):
                    self._leases.refund(place.granted(), self.counted_rows)
            place.gather.unbind()

    def nap_s(self) -> float:
        states = {place.state for place in self.places} if self.ring is not None else set()
        if BufferState.GATHERING in states:
            return _GATHER_NAP_S
        if BufferState.RETURNING in states:
            return _RETURN_NAP_S
        return AT_REST_S if states and states <= _CALLERS else IDLE_NAP_S

    def _in_turn(self) -> list[Place]:
        return self.places[self._turn :] + self.places[: self._turn]

    @property
    def _wanted(self) -> int:
        return max(self._min_committed, self._expected)

    def _bind(self, ring: Ring) -> None:
        """Points every batch buffer at ``ring``; the buffers stay the same while schema and device do."""
        if self.request.rows > ring.at.capacity:
            raise InvalidRequest(
                f"{self.request.describe()} can never be drawn, n={self.request.rows:,} rows: the server's capacity is "
                f"{ring.at.capacity:,} rows",
                rows=self.request.rows,
                capacity_rows=ring.at.capacity,
            )
        kind = (ring.schema, ring.schema.overlay, ring.device, ring.is_staged)
        if kind != self._kind:
            self._kind, self.places, self._turn = kind, [self._make_place(ring, index) for index in range(self._period)], 0
        for place in self.places:
            if place.state is _READY:
                place.happen(BufferEvent.FORGET)
            place.gather.bind(ring.mapping.tensors)
            place.memory.write_back.forget()  # its batch was one of another ring
        self.ring = ring

    def _make_place(self, ring: Ring, index: int) -> Place:
        memory = BatchBuffer(index, ring.schema, self.request, ring.device)
        return Place(memory, make_gather(ring, memory, self._engine.side_streams, self._how), self.counters.batches + 1 + index)

    def _ask(self, place: Place, now_ns: int) -> None:
        place.asked_ns, place.asked_committed, place.is_ahead = now_ns, self._wanted, self._wanted > self._committed
        self._leases.ask(place.number, self.counted_rows, place.asked_committed, self.request.max_age_rows)

    def _parameters(self, place: Place, key: int, grant: Grant) -> Parameters:
        """Of the next draw into ``place``; takes along what was written about the batch that lay there."""
        written = place.memory.write_back
        flags = int(written.has_priorities), int(written.has_values)
        written.forget()
        half_life_rows = self.request.half_life_rows or 0.0
        return Parameters(key, grant.tail, grant.committed - grant.tail, *flags, *self.exponents, half_life_rows)

    def _is_complete(self, place: Place) -> bool:
        """Raises what the gather raised, after giving the lease back: its rows are nobody's batch."""
        try:
            return place.gather.is_complete()
        except Exception:
            self._give_up(place)
            raise

    def _hand_in(self, place: Place) -> None:
        """The gather was seen complete; only now the clock is read. In this order a batch in time was not overwritten while it was read."""
        now_ns = time.monotonic_ns()
        grant = place.granted()
        trace = self._engine.connection.trace
        if trace is not None:
            trace.record(_GATHERS, "gather", place.submitted_ns, now_ns, number=place.number, committed=grant.committed)
        is_late = now_ns > grant.deadline_ns
        is_stale = grant.committed < place.asked_committed
        self._leases.release(grant, is_used=not (is_late or is_stale))
        if is_late:
            place.happen(BufferEvent.LATE)
            self._count_late((now_ns - place.submitted_ns) / 1e6)
            return
        self._late_in_a_row = 0
        if place.asked_ns:  # 0: it was about to be asked for again
            begun_ns = place.submitted_ns if place.is_ahead else place.asked_ns  # who asks later waits no longer for rows
            self.head_start.got_ready(now_ns - begun_ns)
        place.happen(BufferEvent.COMPLETE)
        if is_stale:
            place.happen(BufferEvent.STALE)
            self.counters.dropped += 1

    def _count_late(self, gather_ms: float) -> None:
        self.counters.late += 1
        self.counters.dropped += 1
        self._late_in_a_row += 1
        if self._late_in_a_row == _MOST_LATE:
            lease_ms = self._engine.connection.attached_welcome.lease_ns / 1e6
            self._error = ReplayTimeout(
                f"{_MOST_LATE} batches of {self.request.rows:,} row{'s' * (self.request.rows != 1)} "
                "in a row came after their lease had ended: "
                f"the gather took {gather_ms:.1f} ms, a lease lasts {lease_ms:.0f} ms; "
                "serve with a longer --lease or sample fewer rows",
                gather_ms=gather_ms,
                lease_ms=lease_ms,
            )

    def _give_up(self, place: Place) -> None:
        self._leases.release(place.granted(), is_used=False)
        place.happen(BufferEvent.FORGET)
        self.counters.dropped += 1

    def _drop_ready(self, place: Place) -> None:
        """It was released as used when its gather was complete: only now it is known that nobody will have it."""
        place.happen(BufferEvent.STALE)
        self.counters.dropped += 1
        self._leases.refund(place.granted(), self.counted_rows)

    def _cancel(self, place: Place) -> None:
        self._is_waited_for = False  # or it would be asked for again at once
        if place.state is BufferState.REQUESTED:
            place.happen(BufferEvent.FORGET)
            self._leases.cancel(place.number)
