"""Everything one server owns, in one record: the parts that the loop, the attach desk and the status report look at together."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import zmq
from replay_server_protocol.messages import ServerMessage
from replay_server_protocol.schema import Schema
from replay_server_protocol.trace import Trace

from replay_server.budget import MemoryPlan
from replay_server.config import ServerConfig
from replay_server.control import ControlSocket
from replay_server.counters import Counters, Latency, Rates, Tally
from replay_server.flow import Flow, FlowState
from replay_server.flow_clock import FlowClock
from replay_server.ingress import Ingress
from replay_server.leases import Leases
from replay_server.liveness import DeathWatch
from replay_server.mailbox import Mailboxes
from replay_server.requests import Requests
from replay_server.ring import Ring
from replay_server.run_directory import RunDirectory
from replay_server.sessions import Session, Sessions
from replay_server.storage import RingMemory
from replay_server.tracing import Tracing


class Phase(Enum):
    WAITING_FOR_SCHEMA = "waiting_for_schema"  # no ring yet: the first collector's schema makes it
    WAITING_FOR_MEMORY = "waiting_for_memory"  # a learner of an earlier generation still holds an old ring
    RESTORING = "restoring"  # the ring is being filled from a snapshot; no client is shown it yet
    SERVING = "serving"
    CLOSING = "closing"


@dataclass(slots=True)
class DeviceChoice:
    """Where the ring goes: ``kind`` cpu, cuda or mps; ``ordinal``, ``uuid`` and ``name`` of a GPU."""

    kind: str
    ordinal: int = 0
    uuid: str | None = None
    name: str = ""


@dataclass(slots=True)
class Store:
    """The ring and its way in, from the moment a schema is known."""

    schema: Schema
    plan: MemoryPlan
    ring: Ring
    memory: RingMemory
    ingress: Ingress
    tallies: list[Tally]


@dataclass(slots=True)
class Replay:
    """The server's state. ``store`` is None until a schema is known."""

    config: ServerConfig
    directory: RunDirectory
    device: DeviceChoice
    control: ControlSocket
    sessions: Sessions
    flow: Flow
    flow_clock: FlowClock
    leases: Leases
    mailboxes: Mailboxes
    deaths: DeathWatch
    started_s: float
    tracing: Tracing
    store: Store | None = None
    passes_on: bool = False  # rows go to another node: there is no ring here
    phase: Phase = Phase.WAITING_FOR_SCHEMA
    restored_share: float = 0.0  # of the rows, in phase restoring
    requests: Requests = field(default_factory=Requests)
    counters: Counters = field(default_factory=Counters)
    rates: Rates = field(default_factory=Rates)
    grant_latency: Latency = field(default_factory=Latency)

    @classmethod
    def build(
        cls, config: ServerConfig, directory: RunDirectory, device: DeviceChoice, context: zmq.Context[zmq.Socket[bytes]], now_s: float
    ) -> Replay:
        control = ControlSocket(context, directory.endpoints, config.depth)
        own = Trace(f"replay-server {directory.endpoints.name}") if config.trace is not None else None

        def send(session: Session, message: ServerMessage) -> bool:
            return control.send(session.identity, message)

        return cls(
            config=config,
            directory=directory,
            device=device,
            control=control,
            sessions=Sessions(config.max_collectors, config.max_learners),
            flow=Flow(config.learning_starts, config.samples_per_insert, config.tolerance or 0),
            flow_clock=FlowClock(FlowState, FlowState.WAITING_FOR_SCHEMA, round(now_s * 1e9)),
            leases=Leases(config.lease_ns),
            mailboxes=Mailboxes(directory.run_id, config.mailbox_bytes),
            deaths=DeathWatch(),
            started_s=now_s,
            tracing=Tracing(directory.endpoints, directory.generation, own, send),
        )

    @property
    def phase_text(self) -> str:
        """The phase as reports tell it: ``restoring 43%``."""
        return f"{self.phase.value} {self.restored_share:.0%}" if self.phase is Phase.RESTORING else self.phase.value

    @property
    def generation(self) -> int:
        return self.directory.generation

    def send(self, session: Session, message: ServerMessage) -> bool:
        """Queues a message to a session; False when its connection is gone."""
        return self.control.send(session.identity, message)
