"""A slot holds whole steps, patched and checked before it is published, and says which lane each row belongs to."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_server_client.rows import RowBlock, RowReader
from replay_server_client.slot_plan import LaneChains, SlotPlan
from replay_server_client.slot_writer import Filled, LentSlot, SlotWriter
from replay_server_protocol.errors import RowsRejected, SchemaMismatch
from replay_server_protocol.messages import SegmentLent
from replay_server_protocol.moments import Moments
from replay_server_protocol.schema import Schema

SCHEMA = Schema.of(reward="float32", next_obs=("int32", 2))
NAN = float("nan")


class Slot:
    """A writer over plain memory."""

    def __init__(
        self,
        lanes: int = 2,
        slot_rows: int = 8,
        nonfinite: Literal["reject", "count", "allow"] = "reject",
        links: bool = True,
        moments: tuple[str, ...] = (),
        schema: Schema = SCHEMA,
    ) -> None:
        self.memory = np.zeros((slot_rows, schema.stride), np.uint8)
        self.chains = LaneChains(lanes)
        lent = SegmentLent(1, 1, "replay-x", 1, slot_rows, self.memory.nbytes, schema.to_wire(), list(moments), nonfinite, links)
        self.writer = SlotWriter(0, self.memory, SlotPlan(schema, self.chains, lent))
        self.reader = RowReader(schema, lanes)
        self.schema = schema

    def place(self, rewards: list[float], mask: list[bool] | None = None, start: int = 0) -> int:
        return self.writer.place(self.block(rewards, mask), start)

    def block(self, rewards: list[float], mask: list[bool] | None = None, **final: object) -> RowBlock:
        n = len(rewards)
        rows = {"reward": np.array(rewards, np.float32), "next_obs": np.arange(2 * n, dtype=np.int32).reshape(n, 2)}
        return self.reader.read(rows, None if mask is None else np.array(mask), **final)  # type: ignore[arg-type]

    def column(self, name: str = "reward") -> list[object]:
        return self.schema[name].view(self.memory[: self.writer.rows]).tolist()  # type: ignore[no-any-return]


def lanes_of(filled: Filled) -> list[int]:
    return np.frombuffer(filled.lanes, np.int32).tolist()  # type: ignore[no-any-return]


def test_only_whole_steps_are_placed() -> None:
    slot = Slot(lanes=3, slot_rows=8)
    assert slot.place([0, 1, 2, 3, 4, 5, 6, 7, 8]) == 6
    assert slot.writer.is_full
    assert slot.column() == [0, 1, 2, 3, 4, 5]


def test_whole_steps_without_cuts_need_no_lanes() -> None:
    slot = Slot()
    slot.place([0, 1, 2, 3])
    assert slot.writer.finish().lanes == b""


def test_masked_rows_take_no_place_and_their_lanes_go_on() -> None:
    slot = Slot()
    assert slot.place([0, 1, 2, 3, 4, 5], [True, True, False, True, True, True]) == 6
    assert slot.column() == [0, 1, 3, 4, 5]
    assert lanes_of(slot.writer.finish()) == [0, 1, 1, 0, 1]


def test_masked_block_is_split_at_whole_steps() -> None:
    slot = Slot(slot_rows=3)
    mask = [True, False, True, True, True, True]
    assert slot.place([0, 1, 2, 3, 4, 5], mask) == 4
    assert slot.column() == [0, 2, 3]
    slot.writer.reset()
    assert slot.place([0, 1, 2, 3, 4, 5], mask, start=4) == 2
    assert slot.column() == [4, 5]


def test_final_values_stand_where_the_episode_ends_and_nowhere_else() -> None:
    slot = Slot()
    final = np.full((4, 2), -1, np.int32)
    ends = np.array([False, True, False, False])
    slot.writer.place(slot.block([0, 1, 2, 3], final_mask=ends, final={"next_obs": final}), 0)
    assert slot.column("next_obs") == [[0, 1], [-1, -1], [4, 5], [6, 7]]


def test_final_values_find_their_row_behind_a_mask() -> None:
    slot = Slot(slot_rows=4)
    final = -np.arange(12, dtype=np.int32).reshape(6, 2)
    ends = np.array([False, True, False, True, False, True])
    block = slot.block([0, 1, 2, 3, 4, 5], [True, False, True, True, True, True], final_mask=ends, final={"next_obs": final})
    assert slot.writer.place(block, 0) == 4
    assert slot.column("next_obs") == [[0, 1], [4, 5], [-6, -7]]
    slot.writer.reset()
    assert slot.writer.place(block, 4) == 2
    assert slot.column("next_obs") == [[8, 9], [-10, -11]]


def test_cut_marks_only_the_next_row_of_the_lane() -> None:
    slot = Slot()
    slot.place([0, 1])
    slot.chains.cut(np.array([1]))
    slot.place([2, 3, 4, 5])
    assert lanes_of(slot.writer.finish()) == [0, 1, 0, ~1, 0, 1]
    assert not slot.chains.has_cut


def test_cut_waits_for_a_lane_that_is_masked_out() -> None:
    slot = Slot()
    slot.chains.cut_all()
    slot.place([0, 1, 2, 3], [True, False, True, True])
    assert lanes_of(slot.writer.finish()) == [~0, 0, ~1]


def test_without_links_no_lanes_are_kept() -> None:
    slot = Slot(links=False)
    slot.chains.cut_all()
    slot.place([0, NAN, 2, 3], [True, True, False, True])
    filled = slot.writer.finish()
    assert (filled.rows, filled.rejected, filled.lanes) == (2, 1, b"")


def test_reject_drops_rows_and_cuts_their_lanes() -> None:
    slot = Slot()
    slot.place([0, NAN, 2, 3, 4, float("inf")])
    filled = slot.writer.finish()
    assert (filled.rows, filled.rejected, filled.nonfinite) == (4, 2, 0)
    assert slot.column() == [0, 2, 3, 4]
    assert slot.column("next_obs") == [[0, 1], [4, 5], [6, 7], [8, 9]]
    assert lanes_of(filled) == [0, 0, ~1, 0]
    assert slot.chains.is_cut.tolist() == [False, True]


def test_count_keeps_rows_and_counts_them() -> None:
    slot = Slot(nonfinite="count")
    slot.place([0, NAN, 2, NAN])
    filled = slot.writer.finish()
    assert (filled.rows, filled.rejected, filled.nonfinite, filled.lanes) == (4, 0, 2, b"")


def test_allow_looks_at_nothing() -> None:
    slot = Slot(nonfinite="allow")
    slot.place([NAN, NAN])
    filled = slot.writer.finish()
    assert (filled.rows, filled.rejected, filled.nonfinite) == (2, 0, 0)


def test_bfloat16_reward_is_checked_by_value() -> None:
    schema = Schema.of(reward="bfloat16")
    slot = Slot(schema=schema, moments=("reward",))
    bits = np.array([0x3F80, 0x7F80, 0x4000, 0x7FC0], np.uint16)  # 1, inf, 2, nan
    slot.writer.place(slot.reader.read({"reward": bits}), 0)
    filled = slot.writer.finish()
    assert slot.column() == [0x3F80, 0x4000]
    assert Moments.unpack(filled.moments[0], 1).mean.tolist() == [1.5]


def test_moments_are_those_of_the_finite_rows() -> None:
    slot = Slot(nonfinite="count", moments=("reward", "next_obs"))
    slot.place([1, NAN, 3, 5])
    reward, after = (Moments.unpack(packed, n) for packed, n in zip(slot.writer.finish().moments, (1, 2), strict=True))
    assert (reward.count, reward.mean.tolist(), reward.low.tolist(), reward.high.tolist()) == (3, [3], [1], [5])
    assert (after.count, after.mean.tolist()) == (4, [3, 4])


def test_moments_without_a_finite_row_are_empty() -> None:
    slot = Slot(nonfinite="allow", moments=("reward",))
    slot.place([NAN, NAN])
    assert Moments.unpack(slot.writer.finish().moments[0], 1).count == 0


def test_lent_slot_takes_whole_steps_within_the_slot_only() -> None:
    slot = Slot(lanes=3, slot_rows=8)
    lent = LentSlot(slot.writer, 6, 3)
    assert lent["next_obs"].shape == (6, 2)
    for wrong in (4, 9, -3):
        with pytest.raises(RowsRejected, match="multiple of 3 lanes from 0 to 6"):
            lent.rows = wrong
    with pytest.raises(RowsRejected, match="was not set"):
        lent.checked_rows()
    with pytest.raises(SchemaMismatch, match="no field 'nothing'"):
        lent["nothing"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_lanes_agree_with_a_row_by_row_account(data: st.DataObject) -> None:
    lanes = data.draw(st.integers(1, 4))
    slot = Slot(lanes=lanes, slot_rows=64)
    wanted: list[tuple[int, float]] = []
    cut: set[int] = set()
    for _ in range(data.draw(st.integers(1, 3))):
        some = data.draw(st.lists(st.integers(0, lanes - 1), max_size=lanes))
        slot.chains.cut(np.array(some, np.int64))
        cut |= set(some)
        n = lanes * data.draw(st.integers(1, 4))
        rewards = [data.draw(st.sampled_from([1.0, 2.0, NAN])) for _ in range(n)]
        mask = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
        slot.place(rewards, mask)
        for row in (row for row in range(n) if mask[row]):
            lane = row % lanes
            if np.isnan(rewards[row]):
                cut.add(lane)
                continue
            wanted.append((~lane if lane in cut else lane, rewards[row]))
            cut.discard(lane)
    filled = slot.writer.finish()
    assert slot.column() == [reward for _, reward in wanted]
    plain = [i % lanes for i in range(len(wanted))]
    assert (lanes_of(filled) or plain) == [lane for lane, _ in wanted]
    assert set(np.flatnonzero(slot.chains.is_cut)) == cut


def test_sums_beyond_float64_of_both_signs_warn_nobody() -> None:
    schema = Schema.of(reward="float64")
    slot = Slot(lanes=1, slot_rows=32, moments=("reward",), schema=schema)
    slot.writer.place(slot.reader.read({"reward": np.array([1.7e308, -1.7e308] * 16)}), 0)
    assert slot.writer.finish().moments == [Moments.empty(1).pack()]
