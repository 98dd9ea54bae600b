"""What adds up along lanes, against an account kept row by row; and what is said of it on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_server_client.rows import RowReader
from replay_server_client.slot_plan import LaneChains, SlotPlan
from replay_server_client.slot_writer import Filled, SlotWriter
from replay_server_protocol.episodes import LAST_EPISODES, pack_episodes, unpack_episodes
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import SegmentLent
from replay_server_protocol.moments import Moments
from replay_server_protocol.schema import Schema

from replay_server.episodes import EpisodeTally

GAMMA = 0.9
NAN = float("nan")
PLAIN = Schema.of(reward="float32", terminated="bool", truncated="bool")
WITH_FIRST = Schema.of(reward="float64", terminated="bool", truncated="uint8", first="bool")


class Slots:
    """One slot, filled and finished again and again, as a session's slots are."""

    def __init__(
        self, schema: Schema, lanes: int, slot_rows: int, nonfinite: str = "reject", moments: tuple[str, ...] = ("return",)
    ) -> None:
        self.memory = np.zeros((slot_rows, schema.stride), np.uint8)
        self.chains = LaneChains(lanes)
        lent = SegmentLent(1, 1, "x", 1, slot_rows, self.memory.nbytes, schema.to_wire(), list(moments), nonfinite, False, None, GAMMA)  # type: ignore[arg-type]
        self.writer = SlotWriter(0, self.memory, SlotPlan(schema, self.chains, lent))
        self.reader = RowReader(schema, lanes)
        self.schema = schema

    def write(self, mask: list[bool] | None = None, **columns: Sequence[float]) -> None:
        given = {f.name: np.array(columns[f.name]).astype(f.numpy_dtype) for f in self.schema}
        block = self.reader.read(given, None if mask is None else np.array(mask))
        assert self.writer.place(block, 0) == block.rows

    def finish(self) -> Filled:
        filled = self.writer.finish()
        self.writer.reset()
        return filled


@dataclass
class Account:
    """The slow, obvious one: a loop over rows."""

    lanes: int
    policy: str
    returns: list[float] = field(default_factory=list)
    ended: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.discounted, self.total, self.rows = [0.0] * self.lanes, [0.0] * self.lanes, [0] * self.lanes
        self.is_whole = [True] * self.lanes

    def cut(self, lane: int) -> None:
        self.discounted[lane], self.total[lane], self.rows[lane], self.is_whole[lane] = 0.0, 0.0, 0, False

    def row(self, lane: int, reward: float, end: bool, first: bool) -> None:
        if np.isnan(reward) and self.policy == "reject":
            return self.cut(lane)
        if first:
            self.cut(lane)
            self.is_whole[lane] = True
        if np.isnan(reward):
            self.cut(lane)
            self.rows[lane] = 1
        else:
            self.discounted[lane] = GAMMA * self.discounted[lane] + reward
            self.returns.append(self.discounted[lane])
            self.total[lane] += reward
            self.rows[lane] += 1
        if end:
            if self.is_whole[lane]:
                self.ended.append((self.total[lane], self.rows[lane]))
            self.cut(lane)
            self.is_whole[lane] = True
        return None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_returns_and_episodes_agree_with_a_row_by_row_account(data: st.DataObject) -> None:
    lanes, policy = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(["reject", "count"]))
    has_first, is_plain = data.draw(st.booleans()), data.draw(st.booleans())
    slots, account = Slots(WITH_FIRST if has_first else PLAIN, lanes, 200, policy), Account(lanes, policy)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(1, 4))):
        account.returns.clear()
        account.ended.clear()
        for _ in range(data.draw(st.integers(1, 3))):
            n = lanes * data.draw(st.integers(1, 12))
            rewards = rng.integers(-4, 5, n).astype(float)
            terminated, truncated, first = rng.random(n) < 0.2, rng.random(n) < 0.1, rng.random(n) < 0.1
            mask = np.ones(n, bool) if is_plain else rng.random(n) < 0.8
            if not is_plain:
                rewards[rng.random(n) < 0.05] = NAN
                for lane in np.flatnonzero(rng.random(lanes) < 0.2):
                    slots.chains.cut(np.array([lane]))
                    account.cut(int(lane))
            slots.write(mask.tolist(), reward=rewards, terminated=terminated, truncated=truncated, first=first)  # type: ignore[arg-type]
            for row in np.flatnonzero(mask):
                account.row(int(row) % lanes, rewards[row], bool(terminated[row] | truncated[row]), has_first and bool(first[row]))
        check(slots.finish(), account)


def check(filled: Filled, account: Account) -> None:
    if filled.rows:
        found, every = Moments.unpack(filled.moments[0], 1), np.array(account.returns)
        assert found.count == len(every)
        if len(every):
            assert (found.mean[0], found.low[0], found.high[0]) == pytest.approx((every.mean(), every.min(), every.max()), abs=1e-9)
            assert found.std[0] == pytest.approx(every.std(), abs=1e-9)
    assert (unpack_episodes(filled.episodes).last if filled.episodes else []) == account.ended


def test_many_lanes_one_step_at_a_time_add_up_as_few_do() -> None:
    lanes, steps = 64, 40
    rng = np.random.default_rng(3)
    stepwise, at_once, account = Slots(PLAIN, lanes, lanes), Slots(PLAIN, lanes, lanes * steps), Account(lanes, "reject")
    rewards, ends, no = rng.integers(-3, 4, (steps, lanes)), rng.random((steps, lanes)) < 0.1, np.zeros((steps, lanes))
    ended: list[tuple[float, float]] = []
    for reward, end in zip(rewards, ends, strict=True):
        stepwise.write(reward=reward.tolist(), terminated=end.tolist(), truncated=[0] * lanes)
        account.returns.clear()
        account.ended.clear()
        for lane in range(lanes):
            account.row(lane, float(reward[lane]), bool(end[lane]), False)
        check(filled := stepwise.finish(), account)
        ended += unpack_episodes(filled.episodes).last if filled.episodes else []
    at_once.write(reward=rewards.ravel().tolist(), terminated=ends.ravel().tolist(), truncated=no.ravel().tolist())
    together = unpack_episodes(at_once.finish().episodes)
    assert (together.returns[0], together.last) == (len(ended), ended[-LAST_EPISODES:])


def test_an_episode_that_lost_its_start_does_not_count_and_the_next_one_does() -> None:
    slots = Slots(PLAIN, 1, 8)
    slots.write(reward=[1, 1], terminated=[0, 0], truncated=[0, 0])
    assert slots.finish().episodes == b""
    slots.chains.cut_all()
    slots.write(reward=[2, 2, 3, 3], terminated=[0, 1, 0, 0], truncated=[0, 0, 0, 1])
    assert unpack_episodes(slots.finish().episodes).last == [(6, 2)]


def test_without_a_field_that_ends_only_returns_asked_for_are_kept() -> None:
    slots = Slots(Schema.of(reward="float32"), 1, 8)
    slots.write(reward=[1, 1, 1])
    filled = slots.finish()
    assert filled.episodes == b""
    assert Moments.unpack(filled.moments[0], 1).high[0] == pytest.approx(1 + GAMMA + GAMMA**2)
    nothing = Slots(Schema.of(reward="float32"), 1, 8, moments=())
    assert nothing.writer._plan.sums is None


def test_a_field_named_return_is_a_field() -> None:
    slots = Slots(Schema.of({"return": "float32", "reward": "float32"}), 1, 8)
    slots.write(None, **{"return": [5, 7], "reward": [0, 0]})
    assert Moments.unpack(slots.finish().moments[0], 1).mean.tolist() == [6]


def test_sums_beyond_float64_are_left_out_and_lanes_go_on() -> None:
    slots, no = Slots(WITH_FIRST, 1, 64), [0] * 20
    for end in (0, 0, 1):
        slots.write(reward=[1.7e308], terminated=[end], truncated=[0], first=[0])
        filled = slots.finish()
    assert filled.episodes == b""
    slots.write(reward=[1] * 20, terminated=[0] * 19 + [1], truncated=no, first=no)
    assert unpack_episodes(slots.finish().episodes).last == [(20, 20)]


def test_a_tally_keeps_all_in_sum_and_the_last_hundred_apart() -> None:
    tally = EpisodeTally()
    assert tally.report()["last"] == {"count": 0, "mean_return": None, "mean_length": None}
    returns, lengths = np.arange(250.0), np.arange(1, 251)
    ended = list(zip(returns.tolist(), lengths.tolist(), strict=True))
    for part in (ended[:130], ended[130:]):
        tally.merge(unpack_episodes(pack_episodes(part)))
    report = tally.report()
    assert report["count"] == 250
    assert report["return"] == pytest.approx({"mean": returns.mean(), "std": returns.std(), "min": 0, "max": 249})
    assert report["last"] == pytest.approx({"count": 100, "mean_return": 199.5, "mean_length": 200.5})


def test_episodes_that_can_not_be_are_refused() -> None:
    good = pack_episodes([(1.0, 3), (2.0, 4)])
    assert unpack_episodes(good).last == [(1, 3), (2, 4)]
    nan = np.float64(NAN).tobytes()
    for bad in (good[:-1], good[:-16], good + good[-16:], good[:8] + nan + good[16:], good[:-16] + nan + good[-8:], good[:-8] + bytes(8)):
        with pytest.raises(ProtocolViolation):
            unpack_episodes(bad)
