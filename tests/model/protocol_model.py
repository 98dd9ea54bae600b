"""The protocol between collectors, server, copy stream and learners, as something explore.py can walk.

Four sides: the server (its own parts, daemon.py), the collectors, the learners, the world. A party that is stopped is one whose next step
comes late. Copies, gathers and messages take as long as they like; messages of one client stay in order.
"""

from __future__ import annotations

from model.collector_side import CollectorSide, fresh_collector, fresh_segment
from model.daemon import AS_BUILT, Parts
from model.learner_side import LearnerSide
from model.promises import check, check_at_rest
from model.server_side import ServerSide, Steps
from model.states import Attached, Collector, Learner, Server, Sizes, State
from model.world import World, empty_device
from replay_server_protocol.states import SlotState

_SESSIONS_EACH = 8


class ProtocolModel:
    """The whole world at one size; a mutation replaces one of its sides, or one of the server's parts."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        parts: Parts = AS_BUILT,
        server: type[ServerSide] = ServerSide,
        collector: type[CollectorSide] = CollectorSide,
        learner: type[LearnerSide] = LearnerSide,
        world: type[World] = World,
    ) -> None:
        self.sizes = sizes
        self.server = server(sizes, parts)
        self.collector = collector(sizes)
        self.learner = learner(sizes)
        self.world = world(sizes)

    def start(self) -> State:
        """Everybody is attached, nothing was written."""
        sizes = self.sizes
        tokens = [_SESSIONS_EACH * (1 + index) for index in range(sizes.collectors + sizes.learners)]
        collectors = tuple(fresh_collector(f"collector {at}", token, sizes) for at, token in enumerate(tokens[: sizes.collectors]))
        learners = tuple(Learner(f"learner {at}", token, 1) for at, token in enumerate(tokens[sizes.collectors :]))
        attached = tuple(Attached(x.session, is_ended=False, slots=x.slots) for x in collectors)
        server = Server(1, attached, tuple(x.session for x in learners))
        segments = tuple(fresh_segment(x.session, at, 0, sizes) for at, x in enumerate(collectors))
        return State(server, empty_device(sizes), collectors, learners, segments, (), sizes.faults)

    def steps(self, state: State) -> Steps:
        yield from self.server.steps(state)
        yield from self.world.steps(state)
        yield from self.collector.steps(state)
        yield from self.learner.steps(state)

    def check(self, state: State) -> None:
        check(state, self.sizes)
        if self.is_at_rest(state):
            check_at_rest(state, self.sizes)

    def is_at_rest(self, state: State) -> bool:
        is_busy = state.device.stream or state.server.leases or any(client.to_server or client.from_server for client in state.clients)
        return not is_busy and not self._waiting(state)

    def what_waits(self, state: State) -> str:
        return "; ".join(self._waiting(state))

    def _waiting(self, state: State) -> list[str]:
        """Who has not come to an end, nor waits only for others that have."""
        server = state.server
        waiting = [f"lease {held.lease} is open" for held in server.leases]
        waiting += ["copies are queued"] * bool(state.device.stream)
        for client in state.clients:
            if client.to_server or client.from_server:
                waiting.append(f"messages of {client.name} are under way")
            if client.is_alive != state.is_open(client):
                waiting.append(f"{client.name} is not {'attached' if client.is_alive else 'buried'}")
        collectors = [x.name for x in state.collectors if x.is_alive and not self._has_written(x)]
        learners = [x.name for x in state.learners if x.is_alive and x.batches < self.sizes.batches]
        if collectors and not (self.sizes.samples_per_insert and not learners and server.queue):
            waiting.append(f"{' and '.join(collectors)} wait for credits")
        if learners and (collectors or not self._is_in_vain(state)):
            waiting.append(f"{' and '.join(learners)} wait for batches")
        if server.queue and not (self.sizes.samples_per_insert and not learners):
            waiting.append("publishes are queued")
        return waiting

    def _has_written(self, collector: Collector) -> bool:
        return collector.publishes == self.sizes.publishes and all(slot is SlotState.FREE for slot in collector.slots)

    def _is_in_vain(self, state: State) -> bool:
        """Whether every open request waits for rows, and nobody is left to write them."""
        server = state.server
        asking = [x for x in state.learners if x.is_alive and x.batches < self.sizes.batches]
        at_server = {request.session for request in server.requests}
        is_limited = self.sizes.samples_per_insert is not None
        return (server.committed == 0 or is_limited) and not server.in_flight and all(x.session in at_server for x in asking)
