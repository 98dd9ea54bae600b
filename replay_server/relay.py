"""A server without a ring: it lends slots and grants credits as any other, and passes published rows on to a ring on another node.

```
PUBLISH ─► accept ─► carrier.carry(parcel) … carrier.take_committed() ─► CREDIT
```

A credit still means that the rows are committed, there: what a collector was credited survives the loss of this process, and ``flush``
keeps its word. Sessions, liveness, status and messages are the daemon's own; what carries rows to another node is the carrier's business.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import zmq
from replay_server_protocol.errors import DeviceError
from replay_server_protocol.messages import Publish
from replay_server_protocol.passing import PASSED_OPTIONS, Committed, Passed
from replay_server_protocol.schema import Schema
from replay_server_protocol.segment import Segment

from replay_server.budget import MemoryPlan
from replay_server.config import ServerConfig
from replay_server.counters import Tally
from replay_server.flow import FlowState
from replay_server.ingress import Ingress, Published
from replay_server.metadata import Metadata, Notes
from replay_server.replay import Replay, Store
from replay_server.ring import Ring
from replay_server.server import Server
from replay_server.sessions import CollectorSession
from replay_server.storage import Copy, RingPlace, Write
from replay_server.store import finite_fields, moment_fields

_MOST_DEPTH = 256


class Carrier(Protocol):
    """Carries publishes to the ring's server, each once and those of one origin in order. Called by the loop's thread alone."""

    def agree(self, schema: Schema) -> dict[str, object]:
        """Makes sure that the ring takes rows of this schema; returns the options of its server. Raises what it refuses."""

    def carry(self, passed: Passed) -> None:
        """Takes a publish; never waits."""

    def take_committed(self) -> Sequence[Committed]:
        """What was committed since it was asked last. Never waits."""

    def forget(self, origin: str) -> None:
        """This collector has gone, and all it published is committed."""

    def fileno(self) -> int:
        """Readable when there is something to take."""

    def why_waiting(self) -> str:
        """What the oldest publish waits for, in words."""


@dataclass(slots=True, eq=False)
class NoRing:
    """RingMemory of a server that has none. Knows whose segment is whose, to say when a collector has gone."""

    carrier: Carrier
    place: RingPlace
    origins: dict[str, str]
    device_bytes: int = 0
    host_bytes: int = 0

    def register(self, segment: Segment) -> str:
        return "to another node"

    def unregister(self, segment: Segment) -> None:
        origin = self.origins.pop(segment.name, None)
        if origin is not None and origin not in self.origins.values():  # else its collector has attached again
            self.carrier.forget(origin)

    def submit(self, copies: Sequence[Copy], writes: Sequence[Write] = ()) -> None:
        raise DeviceError("there is no ring here to copy into")

    def completed(self) -> int:
        return 0

    def close(self) -> None:
        return


class RelayIngress(Ingress):
    """Published slots wait for the other node's word instead of for copies."""

    memory: NoRing
    carrier: Carrier

    @property
    def waiting_slots(self) -> int:
        return len(self._queue)

    @property
    def head(self) -> Published | None:
        return self._queue[0] if self._queue else None

    def drain(self, now_ns: int) -> int:
        """Hands every new publish to the carrier. ``_queue`` keeps all without a commit; the first ``_completed`` were handed over."""
        handed = 0
        while self._completed < len(self._queue):
            published = self._queue[self._completed]
            self._completed += 1
            collector, message = published.collector, published.message
            collector.credits.submit(message.slot)
            self._pass_on(published)
            handed += 1
        self.blocked_since_ns = self._queue[0].received_ns if self._queue else None
        return handed

    def commit(self, now_ns: int) -> list[CollectorSession]:
        through: dict[str, Committed] = {}
        for told in self.carrier.take_committed():
            known = through.get(told.origin)
            through[told.origin] = told if known is None or told.number > known.number else known
        if not through:
            return []
        credited: dict[int, CollectorSession] = {}
        kept: deque[Published] = deque()
        for published in self._queue:  # once, however many were told of: with many collectors it is long
            origin, number = numbered(published)
            last = through.get(origin)
            if last is None or number > last.number:
                kept.append(published)
                continue
            self._credit(published, last.committed, now_ns)
            credited[published.collector.token] = published.collector
        self._completed -= len(self._queue) - len(kept)
        self._queue = kept
        return list(credited.values())

    def blocked_by(self) -> FlowState | None:
        return FlowState.COLLECTORS_WAIT_FOR_COPIES if self._queue else None

    def why_blocked(self) -> str | None:
        return self.carrier.why_waiting() if self._queue else None

    def is_consistent(self) -> bool:
        return 0 <= self._completed <= len(self._queue)

    def _pass_on(self, published: Published) -> None:
        collector, message = published.collector, published.message
        assert collector.segment is not None  # it is let go of only when nothing is queued
        is_whole = message.rows == published.rows or (published.is_repeat and message.rows <= collector.slot_rows)
        if not is_whole:
            message = _without_rows(message)
        origin, number = numbered(published)
        self.memory.origins[collector.segment.name] = origin
        begin = message.slot * collector.slot_bytes
        rows = collector.segment.bytes[begin : begin + message.rows * self.layout.stride]
        hello = collector.hello
        self.carrier.carry(Passed(origin, number, collector.name, hello.lanes, hello.counted, message, rows))

    def _credit(self, published: Published, committed: int, now_ns: int) -> None:
        collector, message = published.collector, published.message
        collector.credits.credit(message.number, message.slot)
        collector.queued -= 1
        collector.committed_rows += published.rows
        collector.last_committed_seq = max(collector.last_committed_seq, committed)
        self.counters.rows_committed += published.rows
        if published.rows:
            self._unnoted.append(published)
        self.commit_latency.note(now_ns - published.received_ns)


class RelayServer(Server):
    """The daemon with a carrier in the ring's place. Learners and observers are refused: they belong where the ring is."""

    def __init__(self, config: ServerConfig, carrier: Carrier, *, ahead_bytes: int = 0) -> None:
        """Each collector has ``config.depth`` slots, or as many more as hold ``ahead_bytes``: what is under way must not wait for slots."""
        self._carrier = carrier
        self._ahead_bytes = ahead_bytes
        self._is_to_stop = threading.Event()
        super().__init__(config, None, self._build_store)
        self.replay.passes_on = True

    def ask_to_stop(self) -> None:
        """From any thread, unlike ``stop``: the loop begins to close within its next turn, a tenth of a second at most."""
        self._is_to_stop.set()

    def _is_finished(self) -> bool:
        if self._is_to_stop.is_set():
            self._is_to_stop.clear()
            self.stop()
        return super()._is_finished()

    def _make_poller(self) -> zmq.Poller:
        poller = super()._make_poller()
        poller.register(self._carrier.fileno(), zmq.POLLIN)
        return poller

    def _build_store(self, replay: Replay, schema: Schema, lanes: int) -> Store:
        """What the slots depend on is what the ring's server was started with."""
        options = self._carrier.agree(schema)
        passed = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items() if key in PASSED_OPTIONS}
        replay.config = config = replace(replay.config, **passed)  # type: ignore[arg-type]
        slot_bytes = MemoryPlan.of(config, schema, lanes, is_on_device=False).slot_bytes
        replay.config = config = replace(config, depth=min(_MOST_DEPTH, max(config.depth, -(-self._ahead_bytes // slot_bytes))))
        tallies = [Tally(field) for field in moment_fields(config, schema)]
        finite_fields(config, schema)
        plan = MemoryPlan.of(config, schema, lanes, is_on_device=False)
        metadata = Metadata(tallies, Notes.of(schema), replay.mailboxes.newest_version)
        memory = NoRing(self._carrier, RingPlace("cuda", b"", None, 0), {})
        ring = Ring(plan.capacity, plan.headroom)
        ingress = RelayIngress(ring, memory, plan.layout, replay.flow, replay.leases, metadata, replay.counters, replay.tracing)
        ingress.carrier = self._carrier
        return Store(schema, plan, ring, memory, ingress, tallies)


def numbered(published: Published) -> tuple[str, int]:
    """The publish's origin and its number there, as its collector names them; of one that names none the session and its own number."""
    message = published.message
    if message.origin:
        return message.origin, message.origin_number
    return f"{published.collector.token:016x}", message.number  # unique over all nodes and restarts: a token is random


def _without_rows(message: Publish) -> Publish:
    """The same publish, of no rows and with nothing to say of them: it keeps its place and its number."""
    return message._replace(
        rows=0, masked=0, rejected=0, nonfinite=0, lanes=b"", moments=[], episodes=b"", versions=b"", nonfinite_field="", nonfinite_row=0
    )
