"""One remote collector's session with the sidecar: slots filled with rows that come whole, published under the collector's own numbers."""

from __future__ import annotations

import time
from collections import deque

import numpy as np
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import InvalidRequest, ReplayTimeout, SchemaMismatch
from replay_server_protocol.messages import Credit, Mapped, Publish, Refused, SegmentLent, ServerMessage
from replay_server_protocol.schema import Schema
from replay_server_protocol.segment import Segment

from replay_server_client.connection import Connection, error_of
from replay_server_client.deadline import Deadline
from replay_server_client.ingress import CollectorHello
from replay_server_client.ray.parcel import Bytes, Header, Sender, dressed

_REPEAT_S = 1.0


class Outlet:
    """Never fills a slot without its credit. ``credited`` is the number of the collector through which all is committed.

    Every call raises ServerGone when the sidecar ended: make another one then.
    """

    def __init__(self, endpoints: Endpoints, schema: Schema, sender: Sender, deadline: Deadline) -> None:
        """Attaches. Raises what the sidecar refused, ServerGone, ReplayTimeout when no slots came in time."""
        hello = CollectorHello(sender.name, schema, sender.lanes, sender.counted, None)
        self.credited = 0
        self.committed = 0
        self.used_s = time.monotonic()
        self._schema = schema
        self._connection = Connection(endpoints, hello)
        self._segment: Segment | None = None
        self._free: deque[int] = deque()
        self._unanswered: deque[Publish] = deque()
        self._number = 0
        self._quiet_since_s = time.monotonic()
        try:
            self._connection.attach(deadline)
            self._lent = self._map(deadline)
        except BaseException:
            self.close()
            raise

    @property
    def generation(self) -> int:
        return self._connection.generation

    @property
    def unanswered(self) -> int:
        return len(self._unanswered)

    def publish(self, header: Header, rows: Bytes, deadline: Deadline) -> bool:
        """Takes a credit, copies the rows into its slot and publishes. False when no credit came in time: nothing has changed."""
        n_rows = header.publish[0]
        if not isinstance(n_rows, int) or n_rows > self._lent.slot_rows or n_rows * self._schema.stride != len(rows):
            raise InvalidRequest(f"publish {header.number} of {header.sender.name!r}: {n_rows} rows, {len(rows):,} bytes, don't fit a slot")
        self.absorb()
        while not self._free:
            if deadline.has_passed:
                return False
            self._wait(deadline)
        slot = self._free.popleft()
        begin = slot * self._lent.slot_bytes
        self._bytes[begin : begin + len(rows)] = rows
        self._number += 1
        message = dressed(header, self._connection.session, self._connection.generation, self._number, slot)
        if not self._unanswered:
            self._quiet_since_s = time.monotonic()
        self._unanswered.append(message)
        self._connection.send(message)
        self.used_s = time.monotonic()
        return True

    def settle(self, deadline: Deadline) -> None:
        """Waits until everything published is committed, or the deadline."""
        self.absorb()
        while self._unanswered and not deadline.has_passed:
            self._wait(deadline)

    def absorb(self) -> None:
        """Takes in every message that is there; never waits."""
        while (message := self._connection.receive_nowait()) is not None:
            self._take(message)

    def close(self) -> None:
        """Says bye; what was published goes on to the ring. Safe to call twice."""
        self._connection.close()
        segment, self._segment = self._segment, None
        if segment is not None:
            self._bytes = np.empty(0, np.uint8)
            segment.close()

    def _map(self, deadline: Deadline) -> SegmentLent:
        while True:
            message = self._connection.receive(min(deadline.remaining_s, 0.5))
            if isinstance(message, Refused):
                raise error_of(message)
            if isinstance(message, SegmentLent):
                break
            if deadline.has_passed:
                raise ReplayTimeout(f"no slots were lent after {deadline.elapsed_s:.2f} s: {self._connection.why_silent()}")
        differences = self._schema.differences(Schema.from_wire(message.schema))
        if differences:
            raise SchemaMismatch(f"the ring of server {self._connection.endpoints.name!r} has another schema: {differences}")
        with self._connection.opening_memory():
            self._segment = Segment.open(message.segment, message.depth * message.slot_bytes)
        self._bytes = self._segment.bytes
        self._free.extend(range(message.depth))
        self._connection.send(Mapped(self._connection.session, self._connection.generation))
        return message

    def _wait(self, deadline: Deadline) -> None:
        if self._unanswered and time.monotonic() - self._quiet_since_s >= _REPEAT_S:
            self._quiet_since_s = time.monotonic()
            for publish in self._unanswered:  # libzmq drops what is queued when a connection breaks; the sidecar takes none twice
                self._connection.send(publish)
        self._connection.sleep(min(deadline.remaining_s, _REPEAT_S))
        self.absorb()

    def _take(self, message: ServerMessage) -> None:
        match message:
            case Credit():
                while self._unanswered and self._unanswered[0].number <= message.number:
                    publish = self._unanswered.popleft()
                    self._free.append(publish.slot)
                    self.credited = publish.origin_number
                self.committed = max(self.committed, message.committed)
                self._quiet_since_s = time.monotonic()
            case Refused():
                raise error_of(message)
            case _:
                pass
