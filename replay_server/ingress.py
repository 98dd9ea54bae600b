"""From published slots to committed rows: accept, drain, commit. The order of arrival is the order of the ring.

```
PUBLISH ─► accept ─► queue ─► drain: reserve a span, submit rows (then links) ─► in flight ─► commit: event seen ─► CREDIT
```

The first slot of the queue that may not go on stops the drain: a smaller one behind it never overtakes, or a full slot would wait for
ever behind small flushes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import Publish
from replay_server_protocol.origins import Origins, Turn

from replay_server.counters import Counters, Latency
from replay_server.credit import Verdict
from replay_server.flow import Flow, FlowState
from replay_server.leases import Leases
from replay_server.links import check_lanes, complete, link_span
from replay_server.metadata import NOTHING, Metadata, Said, note_nonfinite
from replay_server.ring import Ring, Span
from replay_server.sessions import CollectorSession
from replay_server.storage import Copy, RingLayout, RingMemory, Write
from replay_server.tracing import Tracing
from replay_server.units import counted

_MOST_IN_FLIGHT = 512
_COPIES = "copies"


@dataclass(slots=True)
class Published:
    """A slot handed over. ``rows`` is 0 when the publish was no good: it keeps its place and gets its credit, its rows are rejected.

    Also when it ``is_repeat``: what it says, its origin had said before in another session, and its rows were taken then.
    """

    collector: CollectorSession
    message: Publish
    rows: int
    received_ns: int
    said: Said = NOTHING
    is_repeat: bool = False


@dataclass(slots=True)
class Flight:
    """One ticket of the ring's memory: a span whose copies are submitted, or a lone write with what follows it.

    ``counted``: rows of the span that flow control counts. ``submitted_ns`` is kept only for a trace.
    """

    published: Published | None
    span: Span
    then: Callable[[], None] | None = None
    submitted_ns: int = 0
    counted: int = 0


class Ingress:
    """The queue of published slots and the spans in flight of one ring."""

    def __init__(
        self,
        ring: Ring,
        memory: RingMemory,
        layout: RingLayout,
        flow: Flow,
        leases: Leases,
        metadata: Metadata,
        counters: Counters,
        tracing: Tracing | None = None,
    ) -> None:
        self.ring = ring
        self.memory = memory
        self.layout = layout
        self.flow = flow
        self.leases = leases
        self.metadata = metadata
        self.counters = counters
        self._tracing = tracing
        self.commit_latency = Latency()
        self.slot_wait = Latency()
        self.blocked_since_ns: int | None = None
        self._queue: deque[Published] = deque()
        self._in_flight: deque[Flight] = deque()
        self._unnoted: list[Published] = []
        self._completed = 0
        self.committed_origins = Origins()
        """The last publish of each origin whose rows are committed: those before it are too."""
        self._origins = Origins()

    @property
    def waiting_slots(self) -> int:
        return len(self._queue)

    @property
    def slots_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def waiting_rows(self) -> int:
        return sum(published.rows for published in self._queue)

    @property
    def head(self) -> Published | None:
        """What the drain looks at next."""
        return self._queue[0] if self._queue else None

    @property
    def oldest_copy(self) -> Flight | None:
        """The first ticket that was not seen complete."""
        return self._in_flight[0] if self._in_flight else None

    def accept(self, collector: CollectorSession, message: Publish, now_ns: int) -> Verdict:
        """Takes a new publish into the queue; repeats and gaps change nothing.

        Raises ProtocolViolation when the collector has no credit for the slot (nothing changes), or when the message doesn't fit its slot:
        then the rows are rejected and counted, and the slot's credit comes back in its turn.
        """
        verdict = collector.credits.judge(message.number)
        if verdict is not Verdict.NEW:
            return verdict
        collector.credits.take(message.number, message.slot)
        turn = self._turn_of(message)
        if turn is Turn.REPEAT:
            collector.queued += 1
            self._queue.append(Published(collector, message, 0, now_ns, is_repeat=True))  # its credit follows that of the first one
            return verdict
        said, wrong = self._judge(collector, message, turn)
        if turn is Turn.EARLY:
            message = message._replace(origin="")  # it was not taken: its number says nothing of what is committed
        rows = message.rows if wrong is None else 0
        rejected = message.rejected + (0 if wrong is None else min(message.rows, collector.slot_rows))
        collector.queued += 1
        collector.published_rows += rows + rejected
        collector.rejected_rows += rejected
        collector.masked_rows += message.masked
        collector.nonfinite_rows += message.nonfinite
        self.counters.rows_published += rows + rejected
        self.counters.rows_rejected += rejected
        self.counters.rows_masked += message.masked
        self.counters.nonfinite_rows += message.nonfinite
        note_nonfinite(collector, message, now_ns)
        self._queue.append(Published(collector, message, rows, now_ns, said))
        if wrong is not None:
            raise ProtocolViolation(f"publish {message.number}: {wrong}; its {message.rows} rows are rejected")
        return verdict

    def drain(self, now_ns: int) -> int:
        """Reserves and submits from the head of the queue until one has to wait; returns how many went on."""
        submitted = 0
        while self._queue and len(self._in_flight) < _MOST_IN_FLIGHT:
            head = self._queue[0]
            if not self._may_go_on(head):
                break
            self._submit(self._queue.popleft())
            self.slot_wait.note(now_ns - head.received_ns)
            submitted += 1
        if not self._queue or submitted:
            self.blocked_since_ns = None
        elif self.blocked_since_ns is None:
            self.blocked_since_ns = now_ns
        return submitted

    def commit(self, now_ns: int) -> list[CollectorSession]:
        """Makes every span visible whose copies were seen complete; returns the collectors that have new credits."""
        credited: dict[int, CollectorSession] = {}
        completed = self.memory.completed()
        while self._completed < completed:
            flight = self._in_flight.popleft()
            self._completed += 1
            if flight.published is not None:
                if flight.submitted_ns:
                    self._trace_copy(flight.published.collector, flight)
                self._commit(flight.published, flight.span, now_ns)
                self.flow.commit(flight.counted)
                collector = flight.published.collector
                credited[collector.token] = collector
            if flight.then is not None:
                flight.then()
        return list(credited.values())

    def note(self) -> None:
        """Adds up what committed publishes say of their rows. After their credits and grants, which somebody waits for."""
        for published in self._unnoted:
            self.metadata.merge(published.collector, published.said)
        self._unnoted.clear()

    def write(self, offset: int, content: bytes, then: Callable[[], None]) -> None:
        """Writes a few bytes beside the rows, in order with the copies; ``then`` runs when they were seen there."""
        self.memory.submit((), (Write(offset, content),))
        self._in_flight.append(Flight(None, Span(self.ring.reserved, 0), then))

    def restore_origins(self, parts: Mapping[str, object]) -> None:
        """What these publishes brought is committed. Raises ValueError when ``parts`` is not that of ``committed_origins``."""
        self._origins.restore(parts)
        self.committed_origins.restore(parts)

    def begin_after(self, tickets: int) -> None:
        """So many tickets of the memory were somebody else's, and are complete."""
        self._completed = tickets

    def blocked_by(self) -> FlowState | None:
        """What the slot that stopped the last ``drain`` still waits for; None when nothing waits or the next drain takes it."""
        head = self.head
        if head is None or self.blocked_since_ns is None:
            return None
        if head.collector.hello.counted and not self.flow.may_insert(head.rows):
            return FlowState.COLLECTORS_WAIT_FOR_SAMPLES
        if self._leased_rows(head):
            return FlowState.COLLECTORS_WAIT_FOR_LEASE
        is_full = len(self._in_flight) >= _MOST_IN_FLIGHT or self.ring.missing_rows(head.rows, None) > 0
        return FlowState.COLLECTORS_WAIT_FOR_COPIES if is_full else None

    def why_blocked(self) -> str | None:
        """What the head of the queue waits for, in words; None when nothing waits."""
        head = self.head
        if head is None:
            return None
        if head.collector.hello.counted:
            reason = self.flow.why_not_insert(head.rows)
            if reason:
                return reason
        missing, oldest = self._leased_rows(head), self.leases.oldest
        if missing and oldest is not None:
            return f"{missing:,} ring rows that lease {oldest.lease} of session {oldest.session} holds from seq {oldest.tail:,}"
        return f"{counted(self.slots_in_flight, 'copy', 'copies')} in flight" if self.slots_in_flight else "the loop's next turn"

    def is_consistent(self) -> bool:
        """The sums of an idle moment: what is in flight is what is reserved and not committed."""
        return sum(flight.span.rows for flight in self._in_flight) == self.ring.in_flight

    def _may_go_on(self, head: Published) -> bool:
        if self.ring.missing_rows(head.rows, self.leases.oldest_tail):
            return False
        return not head.collector.hello.counted or self.flow.may_insert(head.rows)

    def _leased_rows(self, head: Published) -> int:
        """Ring rows that ``head`` lacks, if a lease holds some of them; 0 where it only waits for copies."""
        missing = self.ring.missing_rows(head.rows, self.leases.oldest_tail)
        return missing if missing > self.ring.missing_rows(head.rows, None) else 0

    def _submit(self, published: Published) -> None:
        collector, message = published.collector, published.message
        submitted_ns = time.monotonic_ns() if self._tracing is not None and self._tracing.trace is not None else 0
        span = self.ring.reserve(published.rows, self.leases.oldest_tail)
        counted = self.flow.insert(span.rows) if collector.hello.counted else 0
        copies = []
        if span.rows and collector.segment is not None:
            stride = self.layout.stride
            source = collector.segment.address + message.slot * collector.slot_bytes
            for index, rows in self.ring.pieces(span.first_seq, span.rows):
                copies.append(Copy(index * stride, source, rows * stride))
                source += rows * stride
        self.memory.submit(copies, self._links(collector, message, span) if self.layout.link is not None else ())
        collector.credits.submit(message.slot)
        self._in_flight.append(Flight(published, span, None, submitted_ns, counted))

    def _links(self, collector: CollectorSession, message: Publish, span: Span) -> list[Write]:
        """The span's links, then those of the collector's previous span that lead into it: after the rows, before the event."""
        if not span.rows:
            collector.previous = None  # its rows were rejected: no chain leads over them
            return []
        ring = self.ring
        linked, first_offset = link_span(span.first_seq, span.rows, collector.hello.lanes, message.lanes, ring.ring_rows)
        writes = self._write_links(span.first_seq, linked.links)
        if collector.previous is not None:
            run = complete(collector.previous, linked, first_offset, ring.ring_rows, ring.oldest_owned_seq)
            if run is not None:
                writes += self._write_links(run.first_seq, run.links)
        collector.previous = linked
        return writes

    def _write_links(self, first_seq: int, links: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Write]:
        assert self.layout.link is not None
        writes, start = [], 0
        for index, rows in self.ring.pieces(first_seq, len(links)):
            writes.append(Write(self.layout.link + 8 * index, links[start : start + rows].tobytes()))
            start += rows
        return writes

    def _commit(self, published: Published, span: Span, now_ns: int) -> None:
        collector, message = published.collector, published.message
        self.ring.commit(span)
        collector.credits.credit(message.number, message.slot)
        collector.queued -= 1
        collector.committed_rows += span.rows
        collector.last_committed_seq = span.end_seq
        self.counters.rows_committed += span.rows
        if message.origin:
            self.committed_origins.take(message.origin, message.origin_number)
        if span.rows:
            self._unnoted.append(published)
        self.commit_latency.note(now_ns - published.received_ns)

    def _trace_copy(self, collector: CollectorSession, flight: Flight) -> None:
        """From the submission to the moment at which the loop has seen the event complete; nothing if the trace was switched off since."""
        trace = self._tracing.trace if self._tracing is not None else None
        if trace is None:
            return
        name, span = collector.name, flight.span
        trace.record(_COPIES, "copy", flight.submitted_ns, trace.now_ns(), collector=name, first_seq=span.first_seq, rows=span.rows)

    def _turn_of(self, message: Publish) -> Turn:
        """REPEAT if these rows were taken before, from whichever session passed them on."""
        if not message.origin:
            return Turn.NEXT
        if not 1 <= message.origin_first <= message.origin_number:
            return Turn.EARLY
        turn = self._origins.judge(message.origin, message.origin_number, message.origin_first)
        if turn is Turn.NEXT:
            self._origins.take(message.origin, message.origin_number)
        return turn

    def _judge(self, collector: CollectorSession, message: Publish, turn: Turn) -> tuple[Said, str | None]:
        """What the message says of its rows; and what is wrong, so that they are rejected."""
        if turn is Turn.EARLY:
            return NOTHING, "an earlier publish of its origin is missing"
        if message.rows > collector.slot_rows:
            return NOTHING, f"{message.rows} rows don't fit a slot of {collector.slot_rows}"
        try:
            said = self.metadata.read(message)
            if self.layout.link is not None:
                check_lanes(message.rows, collector.hello.lanes, message.lanes)
        except (ProtocolViolation, ValueError) as error:
            return NOTHING, str(error)
        return said, None
