"""What nobody decides: the copy stream, the clock, deaths, lost messages, a server that is killed while another one starts."""

from __future__ import annotations

from model.leases import ticked
from model.server_side import Steps
from model.states import NOTHING, CopyRows, Device, Past, Row, Server, Sizes, State
from replay_server_protocol.states import BufferState

from replay_server.links import NO_LINK


class World:
    """One copy stream, in order; one clock for all."""

    long_past = -1

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def steps(self, state: State) -> Steps:
        ticket = next((at for at, left in enumerate(state.device.stream) if left), None)
        if ticket is not None:
            op = state.device.stream[ticket][0]
            what = f"copies slot {op.slot} of session {op.session}" if isinstance(op, CopyRows) else f"writes links {list(op.links)}"
            yield f"the stream {what} to ring index {op.ring_index}", lambda: self.copy(state, ticket)
        if any(x.left > self.long_past for x in state.server.leases) or any(
            x.buffer is BufferState.GATHERING and x.grant is not None and x.grant.deadline_ns > self.long_past for x in state.learners
        ):
            yield "the clock ticks", lambda: ticked(state, self.long_past)
        yield from self._faults(state)

    def _faults(self, state: State) -> Steps:
        faults = state.faults
        for client in state.clients if faults.deaths or faults.breaks else ():
            if not client.is_alive:
                continue
            if faults.deaths:
                after = state._replace(faults=faults._replace(deaths=faults.deaths - 1))
                yield f"{client.name} dies", lambda s=after, c=client: s.having(c._replace(is_alive=False, from_server=()))  # type: ignore[misc]
            if faults.breaks:
                after = state._replace(faults=faults._replace(breaks=faults.breaks - 1))
                if client.to_server:
                    yield f"what {client.name} sent is lost", lambda s=after, c=client: s.having(c._replace(to_server=()))  # type: ignore[misc]
                if client.from_server:
                    yield f"what was sent to {client.name} is lost", lambda s=after, c=client: s.having(c._replace(from_server=()))  # type: ignore[misc]
        if faults.restarts:
            yield "the server is killed, another one starts", lambda: self.restart(state)

    def copy(self, state: State, ticket: int) -> State:
        """The next operation of the stream's oldest ticket; a slot is read as it is now."""
        device = state.device
        op, *left = device.stream[ticket]
        if isinstance(op, CopyRows):
            rows = list(device.rows)
            rows[op.ring_index : op.ring_index + op.rows] = self.slot_read(state, op)[op.offset : op.offset + op.rows]
            device = device._replace(rows=tuple(rows))
        else:
            links = list(device.links)
            links[op.ring_index : op.ring_index + len(op.links)] = op.links
            device = device._replace(links=tuple(links))
        stream = (*device.stream[:ticket], tuple(left), *device.stream[ticket + 1 :])
        return state._replace(device=device._replace(stream=stream))

    def slot_read(self, state: State, op: CopyRows) -> tuple[Row, ...]:
        return next(segment.slots[op.slot] for segment in state.segments if segment.session == op.session)

    def restart(self, state: State) -> State:
        """Learners map the old ring until they notice; collectors write into old slots. All messages under way arrive."""
        generation = state.server.generation
        faults = state.faults._replace(restarts=state.faults.restarts - 1)
        past = Past(generation, state.device._replace(stream=()), state.ledger)
        server = Server(generation + 1, (), ())
        pasts = (*state.pasts, past)
        return State(server, empty_device(self.sizes), state.collectors, state.learners, state.segments, (), faults, pasts)


def empty_device(sizes: Sizes) -> Device:
    return Device((NOTHING,) * sizes.ring_rows, (NO_LINK,) * sizes.ring_rows)
