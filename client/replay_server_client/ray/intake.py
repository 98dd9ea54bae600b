"""The host's side of delivery: chunks from other nodes into the local sidecar, in order, each publish once.

What it remembers may be lost at any moment with its process: the sidecar knows which publishes of which origin it took, and has the
last word. What is remembered here only spares work and keeps order: a publish that comes before its turn is left out of the answer and
comes again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ReplayError, ServerGone
from replay_server_protocol.origins import Origins, Turn
from replay_server_protocol.schema import Schema

from replay_server_client.deadline import Deadline
from replay_server_client.ray.outlet import Outlet
from replay_server_client.ray.parcel import Answer, Bytes, Header

_IDLE_S = 300.0


class Intake:
    """One thread uses it."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.parts_taken = 0
        self.parts_repeated = 0
        self.generation = 0
        self._endpoints = endpoints
        self._schema: tuple[dict[str, object], Schema] | None = None
        self._outlets: dict[str, Outlet] = {}
        self._taken = Origins()

    def deliver(self, headers: Sequence[Header], rows: Bytes, schema: dict[str, object], timeout_s: float) -> Answer:
        """Publishes and waits for the commits, ``timeout_s`` seconds at most; the answer says how far it came.

        Raises ServerGone while there is no sidecar, and what the sidecar refuses.
        """
        deadline = Deadline(timeout_s)
        self.close_idle()
        try:
            awaited = self._publish(headers, rows, self._schema_of(schema), deadline)
        except ServerGone:
            self.forget_all()
            raise
        except ReplayError:
            self._drop({header.origin for header in headers})
            raise
        return self._answer(headers, awaited, deadline)

    def forget(self, origins: Sequence[str]) -> None:
        """These collectors have gone."""
        self._drop(origins)

    def forget_all(self) -> None:
        """The sidecar was lost: what its successor takes begins where the answers ended."""
        self._drop(list(self._outlets))
        self._taken = Origins()

    def _publish(self, headers: Sequence[Header], rows: Bytes, schema: Schema, deadline: Deadline) -> set[str]:
        """Returns the origins whose commits are worth waiting for: not those that stopped, or come before their turn."""
        at, stopped, awaited = 0, set[str](), set[str]()
        for header in headers:
            begin, at = at, at + header.n_bytes
            turn = self._taken.judge(header.origin, header.number, header.first)
            self.parts_repeated += turn is Turn.REPEAT
            if turn is not Turn.EARLY:
                awaited.add(header.origin)
            if turn is not Turn.NEXT or header.origin in stopped:
                continue
            if self._outlet(header, schema, deadline).publish(header, rows[begin:at], deadline):
                self._taken.take(header.origin, header.number)
                self.parts_taken += 1
            else:
                stopped.add(header.origin)
        return awaited - stopped

    def _answer(self, headers: Sequence[Header], awaited: set[str], deadline: Deadline) -> Answer:
        through: dict[str, int] = {}
        committed = 0
        try:
            for header in headers:
                outlet = self._outlets.get(header.origin)
                if outlet is not None:
                    outlet.settle(deadline) if header.origin in awaited else outlet.absorb()
                    committed = max(committed, outlet.committed)
        except ServerGone:
            self.forget_all()
            raise
        for header in headers:
            outlet = self._outlets.get(header.origin)
            if outlet is not None:
                through[header.origin] = max(outlet.credited, header.first - 1)
        return Answer(through, self.generation, committed)

    def _schema_of(self, wire: dict[str, object]) -> Schema:
        """Each chunk brings its own: the sidecar's successor, and with it a new forwarder, may have another."""
        if self._schema is None or self._schema[0] != wire:
            self._schema = wire, Schema.from_wire(wire)
        return self._schema[1]

    def _outlet(self, header: Header, schema: Schema, deadline: Deadline) -> Outlet:
        outlet = self._outlets.get(header.origin)
        if outlet is None:
            outlet = Outlet(self._endpoints, schema, header.sender, deadline)
            self._outlets[header.origin] = outlet
            if outlet.generation != self.generation:
                self.generation = outlet.generation
        return outlet

    def _drop(self, origins: Sequence[str] | set[str]) -> None:
        for origin in origins:
            self._taken.forget(origin)  # who comes again is asked of the sidecar again
            outlet = self._outlets.pop(origin, None)
            if outlet is not None:
                with contextlib.suppress(ReplayError):
                    outlet.close()

    def close_idle(self) -> None:
        """Lets go of collectors that said nothing for five minutes: their forwarder may have gone without a word."""
        now_s = time.monotonic()
        self._drop([origin for origin, outlet in self._outlets.items() if not outlet.unanswered and now_s - outlet.used_s > _IDLE_S])
