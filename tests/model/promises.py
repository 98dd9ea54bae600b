"""The protocol's promises as checks. The observer's ledger says for each seq which row was promised, whatever the ring holds."""

from __future__ import annotations

from model.explore import BrokenPromise
from model.states import Row, Segment, Sizes, State
from replay_server_protocol.messages import Grant, Publish
from replay_server_protocol.states import SlotState


def promised(ledger: tuple[Row, ...], segments: tuple[Segment, ...], sizes: Sizes, publish: Publish) -> tuple[Row, ...]:
    """The ledger with the rows of a publish whose span was reserved: each collector's rows once, in the order it wrote them."""
    segment = next(x for x in segments if x.session == publish.session)
    number = segment.base + publish.number
    before = max((row.publish for row in ledger if row.collector == segment.collector), default=0)
    if number <= before:
        word = "a second time" if number == before else f"after publish {before}"
        raise BrokenPromise(f"publish {number} of collector {segment.collector} is taken {word}")
    if publish.number > 1 and number != before + 1:
        raise BrokenPromise(f"publish {number} of collector {segment.collector} is taken though {before + 1} is missing")
    return ledger + sizes.rows_of(segment.collector, number)


def row_fault(state: State, grant: Grant, sizes: Sizes) -> str:
    """What is wrong with the rows of a granted window, as they are now; "" if they are the promised ones."""
    device, ledger = state.ring_of(grant.generation)
    for seq in range(grant.tail, grant.committed):
        there = device.rows[seq % sizes.ring_rows]
        if there != ledger[seq]:
            return f"at seq {seq} {_told(there)} instead of {_told(ledger[seq])}"
    return ""


def chain_fault(state: State, grant: Grant, sizes: Sizes, followed: dict[int, int | None]) -> str:
    """What is wrong with a walk, which found for each seq of the window the next one of its lane."""
    for seq, after in followed.items():
        right = next_in_lane(state, seq, grant, sizes)
        if after != right:
            return f"the link of seq {seq} leads to {_seq(after)} instead of {_seq(right)}"
    return ""


def next_in_lane(state: State, seq: int, grant: Grant, sizes: Sizes) -> int | None:
    """The naive chain: the lane's next row in this or the collector's next span of the session, unless that row is cut off."""
    _, ledger = state.ring_of(grant.generation)
    row = ledger[seq]
    lane = _lane(sizes, row)
    for after in range(seq + 1, grant.committed):
        other = ledger[after]
        if other.collector != row.collector or _lane(sizes, other) != lane:
            continue
        is_near = other.publish <= row.publish + 1 and _session(state, other) == _session(state, row)
        is_cut = sizes.lanes_of(other.publish)[other.offset] < 0
        return after if is_near and not is_cut else None
    return None


def check(state: State, sizes: Sizes) -> None:
    """What holds in every state."""
    server, ring_rows = state.server, sizes.ring_rows
    in_flight = sum(publish.rows for publish, _ in server.in_flight if publish is not None)
    if server.reserved - server.committed != in_flight:
        raise BrokenPromise(f"{in_flight} rows are in flight, {server.reserved - server.committed} are reserved and not committed")
    for seq in range(max(0, server.committed - sizes.capacity), server.committed):
        there = state.device.rows[seq % ring_rows]
        if there != state.ledger[seq]:
            raise BrokenPromise(f"the window shows at seq {seq} {_told(there)} instead of {_told(state.ledger[seq])}")
    for attached in server.collectors:
        rows = sum(publish.rows for publish in server.underway if publish.session == attached.session)
        if attached.published_rows != attached.committed_rows + rows:
            raise BrokenPromise(f"session {attached.session} published {attached.published_rows} rows; that many are not accounted for")
    for collector in state.collectors:
        attached_to = next(
            (x for x in server.collectors if x.session == collector.session and collector.generation == server.generation), None
        )
        for slot, held in enumerate(collector.slots):
            if attached_to is not None and held is SlotState.FREE and attached_to.slots[slot] is not SlotState.FREE:
                raise BrokenPromise(f"{collector.name} and the server both hold slot {slot}: its credit was doubled")


def check_at_rest(state: State, sizes: Sizes) -> None:
    """Every publish was committed, unless its session or its server was lost, or it was lost on its way and its collector is dead."""
    for index, collector in enumerate(state.collectors):
        is_lost_with_it = not collector.is_alive and state.faults.breaks < sizes.faults.breaks
        if is_lost_with_it or collector.sessions > 1 or state.server.generation > 1 or state.faults.partings < sizes.faults.partings:
            continue
        there = {row.publish for row in state.ledger[: state.server.committed] if row.collector == index}
        missing = collector.publishes - len(there) - sum(publish.session == collector.session for publish in state.server.queue)
        if missing:
            raise BrokenPromise(f"all is at rest, and {missing} publishes of {collector.name} were never committed")


def _lane(sizes: Sizes, row: Row) -> int:
    coded = sizes.lanes_of(row.publish)[row.offset]
    return max(coded, ~coded)


def _session(state: State, row: Row) -> int:
    return max(x.session for x in state.segments if x.collector == row.collector and x.base < row.publish)


def _told(row: Row) -> str:
    return f"row {row.publish}.{row.offset} of collector {row.collector}" if row.collector >= 0 else "nothing"


def _seq(seq: int | None) -> str:
    return "none" if seq is None else f"seq {seq}"
