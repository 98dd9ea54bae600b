"""Flow control: the band is never left, never a dead end, and every refusal names its numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay_server.flow import Flow, FlowState

RATIOS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0, 32.0])


@given(
    ratio=RATIOS,
    tolerance=st.integers(0, 400),
    learning_starts=st.integers(0, 60),
    moves=st.lists(st.tuples(st.booleans(), st.integers(1, 64), st.booleans()), max_size=60),
)
def test_the_band_is_never_left_and_both_sides_wait_exactly_at_its_edges(
    ratio: float, tolerance: int, learning_starts: int, moves: list[tuple[bool, int, bool]]
) -> None:
    flow = Flow(learning_starts, ratio, tolerance)
    rows_in, sampled, granted = 0, 0, []
    for is_insert, rows, is_dropped in moves:
        counted = max(0, rows_in - learning_starts)
        if is_insert:
            after = max(0, rows_in + rows - learning_starts)
            may = after == 0 or Fraction(ratio) * after - sampled <= tolerance
            assert (flow.why_not_insert(rows) is None) == may
            if may:
                flow.commit(flow.insert(rows))
                rows_in += rows
        else:
            may = rows_in >= max(1, learning_starts) and sampled + rows - Fraction(ratio) * counted <= tolerance
            assert (flow.why_not_sample(rows, rows_in, 0) is None) == may
            if may:
                flow.sample(rows)
                sampled += rows
                granted.append(rows)
        if is_dropped and granted:
            sampled -= granted[-1]
            flow.refund(granted.pop())
        counted = max(0, rows_in - learning_starts)
        assert (flow.inserted, flow.sampled) == (counted, sampled)
        assert sampled - Fraction(ratio) * counted <= tolerance


@given(ratio=RATIOS, batch=st.integers(1, 64), slot=st.integers(1, 64), extra=st.integers(0, 3), order=st.lists(st.booleans(), max_size=40))
def test_a_tolerance_that_is_not_refused_never_dead_ends(ratio: float, batch: int, slot: int, extra: int, order: list[bool]) -> None:
    needed = batch + ratio * slot
    tolerance = int(-(-needed // 2)) + extra
    flow = Flow(0, ratio, tolerance)
    assert flow.why_impossible(batch, slot) is None
    rows_in = 0
    for prefers_insert in order:
        may_insert = flow.why_not_insert(slot) is None
        may_sample = flow.why_not_sample(batch, max(1, rows_in), 0) is None
        assert may_insert or may_sample
        if may_insert and (prefers_insert or not may_sample):
            flow.commit(flow.insert(slot))
            rows_in += slot
        else:
            flow.sample(batch)


@given(ratio=RATIOS, batch=st.integers(1, 64), slot=st.integers(1, 64))
def test_a_tolerance_too_small_is_refused_with_the_one_that_is_enough(ratio: float, batch: int, slot: int) -> None:
    needed = batch + ratio * slot
    too_small = max(0, -(-int(needed) // 2) - 1)
    reason = Flow(0, ratio, too_small).why_impossible(batch, slot)
    assert reason is not None
    assert f"2 x tolerance is {2 * too_small:,}" in reason
    enough = int(reason.rpartition("raise --tolerance to ")[2].replace(",", ""))
    assert Flow(0, ratio, enough).why_impossible(batch, slot) is None


def test_without_a_ratio_neither_side_waits_for_the_other() -> None:
    flow = Flow()
    flow.insert(10**9)
    assert flow.why_not_insert(10**9) is None
    assert flow.why_not_sample(10**9, 1, 0) is None
    assert flow.why_impossible(10**9, 10**9) is None


def test_learning_starts_names_what_is_needed_and_what_is_there() -> None:
    reason = Flow(learning_starts=10_000).why_not_sample(1, 812, 0)
    assert reason is not None
    assert "10,000" in reason
    assert "812" in reason
    assert Flow(learning_starts=10_000).why_not_sample(1, 10_000, 0) is None


def test_nothing_is_drawn_from_an_empty_ring() -> None:
    assert Flow().why_not_sample(1, 0, 0) is not None
    assert Flow().why_not_sample(1, 1, 0) is None


def test_freshness_waits_for_the_seq_and_names_both() -> None:
    reason = Flow().why_not_sample(1, 99, 100)
    assert reason is not None
    assert "100" in reason
    assert "99" in reason
    assert Flow().why_not_sample(1, 100, 100) is None


def test_rows_before_learning_starts_are_free() -> None:
    flow = Flow(learning_starts=100, samples_per_insert=1.0, tolerance=0)
    assert flow.why_not_insert(100) is None
    flow.insert(100)
    assert flow.inserted == 0
    assert flow.why_not_insert(1) is not None


def test_a_new_ratio_counts_from_its_setting() -> None:
    flow = Flow(0, 1.0, 10)
    flow.insert(10)
    assert flow.why_not_insert(1) is not None
    flow.set_ratio(2.0)
    assert (flow.inserted, flow.sampled) == (0, 0)
    assert flow.why_not_insert(5) is None
    assert flow.why_not_insert(6) is not None


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("inf"), float("nan"), 1e9])
def test_a_ratio_out_of_range_is_refused_and_changes_nothing(ratio: float) -> None:
    flow = Flow(0, 1.0, 10)
    flow.insert(3)
    with pytest.raises(ValueError, match="samples per insert"):
        flow.set_ratio(ratio)
    assert (flow.samples_per_insert, flow.inserted) == (1.0, 3)


def test_a_negative_tolerance_is_refused() -> None:
    flow = Flow(0, 1.0, 10)
    with pytest.raises(ValueError, match="tolerance"):
        flow.set_tolerance(-1)
    flow.set_tolerance(0)
    assert flow.tolerance == 0


def test_a_grant_looks_only_at_rows_that_are_committed() -> None:
    flow = Flow(0, 2.0, 16)
    counted = flow.insert(8)
    flow.sample(16)
    assert flow.sample_waits_for(16, 8, 0) is FlowState.LEARNERS_WAIT_FOR_INSERTS
    flow.commit(counted)
    assert flow.sample_waits_for(16, 8, 0) is None


def test_rows_on_their_way_before_a_new_ratio_do_not_hold_later_ones_back() -> None:
    flow = Flow(0, 1.0, 10)
    counted = flow.insert(8)
    flow.set_ratio(1.0)
    flow.commit(flow.insert(4))
    flow.commit(counted)
    assert flow.arriving == 0
    assert flow.sample_waits_for(14, 12, 0) is None
    assert flow.sample_waits_for(15, 12, 0) is FlowState.LEARNERS_WAIT_FOR_INSERTS


@given(ratio=RATIOS, updates=st.integers(1, 8), batch=st.sampled_from([2, 8, 64]), steps=st.integers(0, 60))
def test_half_a_slot_of_learning_starts_makes_both_sides_take_turns(ratio: float, updates: int, batch: int, steps: int) -> None:
    slot = Fraction(updates * batch) / Fraction(ratio)
    if slot.denominator != 1 or slot % 2:
        return
    rows = int(slot)
    flow = Flow(rows // 2, ratio, -(-(batch + updates * batch) // 2))
    assert flow.why_impossible(batch, rows) is None
    rows_in, turns = 0, ""
    for _ in range(steps):
        may_insert, may_sample = flow.may_insert(rows), flow.sample_waits_for(batch, rows_in, 0) is None
        assert may_insert != may_sample
        if may_insert:
            flow.commit(flow.insert(rows))
            rows_in += rows
            turns += "I"
        else:
            flow.sample(batch)
            turns += "S"
    assert turns == (("I" + "S" * updates) * len(turns))[: len(turns)]


@pytest.mark.parametrize(
    ("state", "side"),
    [
        (FlowState.FREE, None),
        (FlowState.COLLECTORS_WAIT_FOR_LEASE, "collectors"),
        (FlowState.LEARNERS_WAIT_FOR_SEQ, "learners"),
        (FlowState.BOTH_WAIT, "both"),
        (FlowState.WAITING_FOR_SCHEMA, None),
        (FlowState.CLOSING, None),
    ],
)
def test_a_state_says_which_side_it_blocks(state: FlowState, side: str | None) -> None:
    assert state.blocked_side == side
