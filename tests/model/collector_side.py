"""A collector's steps, after ``ingress.py``, ``slots.py`` and ``publishes.py`` of the client."""

from __future__ import annotations

from typing import TypeVar, cast

import numpy as np
from model.explore import BrokenPromise
from model.server_side import Steps
from model.states import NOTHING, Attached, Collector, Segment, Sizes, State
from replay_server_protocol.messages import Publish
from replay_server_protocol.states import SLOT, SlotEvent, SlotState, move

T = TypeVar("T")
_NO_MOMENTS = cast(list[bytes], ())


class CollectorSide:
    """Writes, publishes, takes credits, repeats what is unanswered, attaches again."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def steps(self, state: State) -> Steps:
        for collector in state.collectors:
            if collector.is_alive:
                yield from self.steps_of(state, collector)

    def steps_of(self, state: State, collector: Collector) -> Steps:
        name = collector.name
        if collector.publishes < self.sizes.publishes and SlotState.FREE in collector.slots:
            slot = collector.slots.index(SlotState.FREE)
            yield f"{name} fills slot {slot} and publishes it as {collector.number + 1}", lambda: self.publish(state, collector, slot)
        if collector.from_server:
            credit = collector.from_server[0]
            yield f"{name} takes the credit up to {credit.number}", lambda: self.take_credit(state, collector)
        if self.may_repeat(state, collector):
            yield f"{name} repeats what is unanswered", lambda: self.repeat(state, collector)
        if not state.is_open(collector):
            yield f"{name} notices that its session is gone and attaches again", lambda: self.attach(state, collector)

    def publish(self, state: State, collector: Collector, slot: int) -> State:
        """Bytes first, then the message."""
        for message in state.server.underway:
            if (message.session, message.slot) == (collector.session, slot) and state.is_open(collector):
                raise BrokenPromise(
                    f"slot {slot} of {collector.name} is written again before its copy for publish {message.number} was seen done"
                )
        publish = collector.publishes + 1
        segments = tuple(self._filled(x, slot, publish) if x.session == collector.session else x for x in state.segments)
        message = self._message(collector, slot, publish)
        opened = move(SLOT, collector.slots[slot], SlotEvent.OPEN)
        slots = _with(collector.slots, slot, move(SLOT, opened, SlotEvent.PUBLISH))
        collector = collector._replace(
            slots=slots,
            unanswered=(*collector.unanswered, message),
            number=message.number,
            publishes=publish,
            to_server=(*collector.to_server, message),
        )
        return state._replace(segments=segments).having(collector)

    def take_credit(self, state: State, collector: Collector) -> State:
        """One credit answers all publishes up to its number; one of another session changes nothing."""
        credit, *left = collector.from_server
        collector = collector._replace(from_server=tuple(left))
        if not self.is_mine(collector, credit.session, credit.generation):
            return state.having(collector)
        slots, unanswered = collector.slots, list(collector.unanswered)
        while unanswered and unanswered[0].number <= credit.number:
            slot = unanswered.pop(0).slot
            slots = _with(slots, slot, move(SLOT, slots[slot], SlotEvent.CREDIT))
        return state.having(collector._replace(slots=slots, unanswered=tuple(unanswered)))

    def is_mine(self, collector: Collector, session: int, generation: int) -> bool:
        return (session, generation) == (collector.session, collector.generation)

    def may_repeat(self, state: State, collector: Collector) -> bool:
        """After a second of silence: with nothing under way and nothing at the server it is needed, else it counts among the faults."""
        if not collector.unanswered:
            return False
        is_at_server = any(publish.session == collector.session for publish in state.server.underway)
        is_needed = not (collector.to_server or collector.from_server or is_at_server)
        return (is_needed and state.is_open(collector)) or state.faults.repeats > 0

    def repeat(self, state: State, collector: Collector) -> State:
        if collector.to_server or collector.from_server or state.faults.repeats:
            state = state._replace(faults=state.faults._replace(repeats=max(0, state.faults.repeats - 1)))
        return state.having(collector._replace(to_server=(*collector.to_server, *collector.unanswered)))

    def attach(self, state: State, collector: Collector) -> State:
        """A new session with slots of its own, in one step; what was in flight is lost to this client, and all its chains are cut."""
        session = collector.session + 1
        fresh = fresh_collector(collector.name, session, self.sizes)._replace(
            generation=state.server.generation,
            publishes=collector.publishes,
            sessions=collector.sessions + 1,
            to_server=collector.to_server,
            from_server=collector.from_server,
        )
        attached = Attached(session, is_ended=False, slots=fresh.slots)
        server = state.server._replace(collectors=(*state.server.collectors, attached))
        index = state.collectors.index(collector)
        segments = (*state.segments, fresh_segment(session, index, collector.publishes, self.sizes))
        return state._replace(server=server, segments=segments).having(fresh)

    def _filled(self, segment: Segment, slot: int, publish: int) -> Segment:
        rows = self.sizes.rows_of(segment.collector, publish)
        return segment._replace(slots=_with(segment.slots, slot, rows + segment.slots[slot][len(rows) :]))

    def _message(self, collector: Collector, slot: int, publish: int) -> Publish:
        lanes = self.sizes.lanes_of(publish)
        if collector.sessions > 1 and collector.number == 0:
            lanes = tuple(~lane if lane >= 0 and lane not in lanes[:offset] else lane for offset, lane in enumerate(lanes))
        coded = np.array(lanes, "<i4").tobytes() if self.sizes.has_links else b""
        number, rows = collector.number + 1, len(lanes)
        return Publish(collector.session, collector.generation, number, slot, rows, 0, 0, 0, coded, _NO_MOMENTS)


def fresh_collector(name: str, session: int, sizes: Sizes) -> Collector:
    return Collector(name, session, 1, (SlotState.FREE,) * sizes.depth)


def fresh_segment(session: int, collector: int, base: int, sizes: Sizes) -> Segment:
    return Segment(session, collector, base, ((NOTHING,) * sizes.slot_rows,) * sizes.depth)


def _with(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])
