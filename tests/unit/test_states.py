"""Each table walked whole: the moves there are, and that there is no other."""

from __future__ import annotations

from enum import Enum
from itertools import product
from typing import Any

import pytest
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.states import (
    BUFFER,
    LEASE,
    SESSION,
    SLOT,
    BufferEvent,
    BufferState,
    LeaseEvent,
    LeaseState,
    SessionEvent,
    SessionState,
    SlotEvent,
    SlotState,
    move,
)

Table = dict[tuple[Any, Any], Any]

TABLES: list[tuple[Table, type[Enum], type[Enum], Enum, set[Enum]]] = [
    (SESSION, SessionState, SessionEvent, SessionState.GREETED, {SessionState.ENDED}),
    (SLOT, SlotState, SlotEvent, SlotState.FREE, set()),
    (LEASE, LeaseState, LeaseEvent, LeaseState.OPEN, {LeaseState.RELEASED, LeaseState.REVOKED, LeaseState.ORPHANED}),
    (BUFFER, BufferState, BufferEvent, BufferState.FREE, set()),
]
PAIRS = [
    pytest.param(table, state, event, id=f"{state}-{event}")
    for table, states, events, *_ in TABLES
    for state, event in product(states, events)
]


@pytest.mark.parametrize(("table", "state", "event"), PAIRS)
def test_pair_moves_as_the_table_says_or_raises_naming_both_and_changes_nothing(table: Table, state: Enum, event: Enum) -> None:
    before = dict(table)
    if (state, event) in table:
        assert move(table, state, event) is table[state, event]
    else:
        with pytest.raises(ProtocolViolation, match=f"^{type(state).__name__} {state.value}: {event.value} isn't allowed now$"):
            move(table, state, event)
    assert table == before


@pytest.mark.parametrize(("table", "states", "events", "first", "final"), TABLES)
def test_every_state_is_reached_every_event_used_and_only_final_states_have_no_way_out(
    table: Table, states: type[Enum], events: type[Enum], first: Enum, final: set[Enum]
) -> None:
    reached = {first}
    while more := {after for (state, _), after in table.items() if state in reached} - reached:
        reached |= more
    assert reached == set(states)
    assert {event for _, event in table} == set(events)
    assert set(states) - {state for state, _ in table} == final


def test_slot_is_never_opened_before_its_credit() -> None:
    allowed = {state for state in SlotState if (state, SlotEvent.OPEN) in SLOT}
    assert allowed == {SlotState.FREE}
    assert {state for (state, event), after in SLOT.items() if after is SlotState.FREE and event is not SlotEvent.ABANDON} == {
        SlotState.PUBLISHED,
        SlotState.COPYING,
    }


def test_lease_ends_once() -> None:
    ended = move(LEASE, LeaseState.OPEN, LeaseEvent.DEADLINE)
    for event in LeaseEvent:
        with pytest.raises(ProtocolViolation):
            move(LEASE, ended, event)


def test_batch_is_lent_only_after_its_gather_was_seen_complete() -> None:
    assert [key for key, after in BUFFER.items() if after is BufferState.LENT] == [(BufferState.READY, BufferEvent.TAKE)]
    assert [key for key, after in BUFFER.items() if after is BufferState.READY] == [(BufferState.GATHERING, BufferEvent.COMPLETE)]


def test_event_of_another_table_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="SlotState free: release"):
        move(SLOT, SlotState.FREE, LeaseEvent.RELEASE)  # type: ignore[misc]
