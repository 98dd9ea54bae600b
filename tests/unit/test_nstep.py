"""n-step rows are right for every row of every window: the sum, the bootstrap row and its flags, and not one other byte changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from replay_server_client.nstep import NStep, NStepOutputs
from replay_server_client.rows import RowReader
from replay_server_client.slot_plan import LaneChains, SlotPlan
from replay_server_client.slot_writer import SlotWriter
from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.messages import SegmentLent
from replay_server_protocol.schema import Schema
from support.streams import Row, Stream, random_stream, view_of
from torch import Tensor

CPU = torch.device("cpu")
OBS = ("float32", 3)
USUAL = Schema.of(seq="int64", obs=OBS, reward="float32", next_obs=OBS, terminated="bool", truncated="bool", last="uint8")
SCHEMAS = {
    "usual": USUAL,
    "flags first": Schema.of(pad="uint8", terminated="bool", truncated="bool", next_obs=("int16", 3), obs=("int16", 3), reward="float64"),
    "no truncated": Schema.of(seq="int64", terminated="float32", obs=OBS, next_obs=OBS, reward="float32"),
    "vector reward": Schema.of(obs=OBS, next_obs=OBS, reward=("float16", 2), truncated="int32", terminated="uint16", seq="int64"),
    "two pairs": Schema.of(
        x="uint8", next_x="uint8", reward="bfloat16", obs=OBS, next_obs=OBS, z="int64", next_z="int64", terminated="bool"
    ),
    "first": Schema.of(seq="int64", obs=OBS, reward="float32", next_obs=OBS, terminated="bool", truncated="bool", first="bool"),
}


def outputs_of(n: int) -> NStepOutputs:
    return NStepOutputs(torch.full((n,), -1.0), torch.full((n,), -1), torch.full((n,), -1.0))


def derive(nstep: NStep, stream: Stream, seqs: list[int], window: range, outputs: NStepOutputs) -> Tensor:
    ring, link = stream.with_garbage_outside(window)
    first = torch.tensor(seqs)
    rows = ring[first % stream.ring_rows]
    nstep.derive(ring, link, first % stream.ring_rows, first, torch.tensor(window.stop), rows, outputs)
    return rows


def expected_row(stream: Stream, used: list[Row], gamma: float) -> Tensor:
    """The start row with the sum of the rewards used, and the last row's next fields and flags."""
    schema, start, last = stream.schema, *(stream.ring[row.seq % stream.ring_rows][None] for row in (used[0], used[-1]))
    row, reward = start.clone(), schema.role("reward")
    rewards = [view_of(stream.ring[r.seq % stream.ring_rows][None], reward).double() for r in used]
    view_of(row, reward).copy_(torch.stack([gamma**k * value for k, value in enumerate(rewards)]).sum(0))
    for name in (*schema.pairs.values(), *(schema.roles[role] for role in ("terminated", "truncated") if role in schema.roles)):
        row[:, schema[name].offset : schema[name].end] = last[:, schema[name].offset : schema[name].end]
    return row[0]


@pytest.mark.parametrize("n_step", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_row_of_every_window_is_the_naive_n_step_row(schema: Schema, n_step: int) -> None:
    """gamma 0.5 and small whole rewards: every sum is exact in every dtype's arithmetic, so bytes can be compared."""
    gamma = 0.5
    for seed in range(4):
        stream = random_stream(seed, schema, has_big_slots=seed % 2 == 0)
        for window in stream.windows():
            outputs = outputs_of(len(window))
            rows = derive(NStep(schema, n_step, gamma, CPU), stream, list(window), window, outputs)
            for i, seq in enumerate(window):
                used = stream.chain(seq, window.stop, n_step)
                assert rows[i].tolist() == expected_row(stream, used, gamma).tolist(), f"seed {seed}, {window}, seq {seq}"
                assert outputs.n_steps[i] == len(used)
                assert outputs.discount[i] == gamma ** len(used)
                assert outputs.bootstrap[i] == (0 if used[-1].is_terminated else gamma ** len(used))


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_rows_gathered_by_selected_words_are_those_gathered_in_two_steps(schema: Schema) -> None:
    stream = random_stream(5, schema)
    for window in stream.windows():
        two_steps, selected, outputs = NStep(schema, 3, 0.5, CPU), NStep(schema, 3, 0.5, CPU), outputs_of(len(window))
        selected.takes_rows = True
        expected = derive(two_steps, stream, list(window), window, outputs)
        assert torch.equal(derive(selected, stream, list(window), window, outputs), expected)


def test_one_step_leaves_rows_unchanged() -> None:
    stream = random_stream(1, USUAL)
    window = range(stream.reserved - 5, stream.reserved)
    outputs = outputs_of(5)
    rows = derive(NStep(USUAL, 1, 0.99, CPU), stream, list(window), window, outputs)
    assert torch.equal(rows, stream.ring[torch.tensor(list(window)) % stream.ring_rows])
    assert outputs.n_steps.tolist() == [1] * 5
    assert torch.equal(outputs.discount, torch.full((5,), 0.99))


@pytest.mark.parametrize("n_step", [2, 3, 10, 37])
def test_sums_in_float32_are_those_of_python_up_to_rounding(n_step: int) -> None:
    stream = Stream(USUAL, 80, 8, random.Random(0))
    while stream.reserved < 80:
        stream.write(8, is_plain=True, p_end=0.02)
    window, outputs = range(80), outputs_of(80)
    rows = derive(NStep(USUAL, n_step, 0.97, CPU), stream, list(window), window, outputs)
    used = [stream.chain(seq, 80, n_step) for seq in window]
    sums = torch.tensor([[sum(0.97**k * row.reward for k, row in enumerate(chain))] for chain in used])
    torch.testing.assert_close(view_of(rows, USUAL["reward"]), sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs.discount, torch.tensor([0.97 ** len(chain) for chain in used]))


def test_an_infinite_reward_of_the_last_row_stays_infinite() -> None:
    """It isn't multiplied by 0 for the rows that are not there."""
    stream = Stream(USUAL, 8, 4, random.Random(0))
    stream.write(4, is_plain=True, p_end=0)
    view_of(stream.ring, USUAL["reward"])[3] = float("inf")
    rows = derive(NStep(USUAL, 3, 0.9, CPU), stream, [2, 3], range(4), outputs_of(2))
    assert torch.isposinf(view_of(rows, USUAL["reward"])).all()


def test_window_across_the_write_head_never_joins_newest_and_oldest() -> None:
    """D01: capacity 64, one lane, episodes of 7, 500 rows, 10,000 draws."""
    rng = random.Random(1)
    stream = Stream(USUAL, 64, 4, rng)
    for seq in range(500):
        stream.write(1, is_plain=True, p_end=float(seq % 7 == 6))
    window = range(436, 500)
    seqs = [rng.choice(window) for _ in range(10_000)]
    outputs = outputs_of(len(seqs))
    rows = derive(NStep(USUAL, 3, 0.5, CPU), stream, seqs, window, outputs)
    obs, next_obs = view_of(rows, USUAL["obs"]), view_of(rows, USUAL["next_obs"])
    assert torch.equal(next_obs[:, 1], obs[:, 1]), "one episode"
    assert torch.equal(next_obs[:, 2] - obs[:, 2], outputs.n_steps.float()), "consecutive steps"
    assert torch.equal(outputs.discount, 0.5**outputs.n_steps)
    assert outputs.n_steps.tolist() == [min(3, 7 - seq % 7, 500 - seq) for seq in seqs]


def test_an_episode_cut_by_a_time_limit_stops_the_sum_where_a_terminal_state_does() -> None:
    """D02: the same five transitions, terminated in lane 0, truncated in lane 1; then each lane's next episode."""
    stream = Stream(USUAL, 32, 20, random.Random(0), lanes=(2,))
    stream.write(10, is_plain=True, p_end=0)
    columns = {name: view_of(stream.ring, USUAL[name]) for name in USUAL.names}
    columns["reward"][:20] = torch.arange(20).div(2, rounding_mode="floor")[:, None].float()
    columns["terminated"][8], columns["truncated"][9] = True, True
    columns["next_obs"][8:10] = -5.0  # the final observation
    outputs = outputs_of(20)
    rows = derive(NStep(USUAL, 3, 0.5, CPU), stream, list(range(20)), range(20), outputs)
    reward, next_obs = view_of(rows, USUAL["reward"])[:, 0], view_of(rows, USUAL["next_obs"])
    assert reward[0:10:2].tolist() == reward[1:10:2].tolist() == [1.0, 2.75, 4.5, 5.0, 4.0]
    assert outputs.n_steps[:10].tolist() == [3, 3, 3, 3, 3, 3, 2, 2, 1, 1]
    assert (next_obs[4:10] == -5).all()
    assert (next_obs[:4] != -5).all()
    assert outputs.bootstrap[0:10:2].tolist() == [0.125, 0.125, 0, 0, 0]
    assert outputs.bootstrap[1:10:2].tolist() == [0.125, 0.125, 0.125, 0.25, 0.5]


def test_final_values_of_a_slots_last_use_reach_no_later_row() -> None:
    """D03: chunk A ends an episode, chunk B goes through the same slot without an end, its final values left as they were."""
    schema = Schema.of(obs="int32", reward="float32", next_obs="int32", terminated="bool", truncated="bool")
    memory = np.zeros((4, schema.stride), np.uint8)
    lent = SegmentLent(1, 1, "replay-x", 1, 4, memory.nbytes, schema.to_wire(), [], "reject", True)
    writer, reader = SlotWriter(0, memory, SlotPlan(schema, LaneChains(1), lent)), RowReader(schema, 1)
    final, ring, link = np.full(4, -9, np.int32), torch.zeros((12, schema.stride), dtype=torch.uint8), torch.arange(1, 13)
    for chunk, ends in enumerate(([False, True, False, False], [False] * 4)):
        step = np.arange(4 * chunk, 4 * chunk + 4, dtype=np.int32)
        rows = {"obs": step, "reward": np.ones(4, np.float32), "next_obs": step + 1, "terminated": np.zeros(4, bool)}
        rows["truncated"] = np.array(ends)
        writer.place(reader.read(rows, final_mask=np.array(ends), final={"next_obs": final}), 0)
        ring[4 * chunk : 4 * chunk + 4] = torch.from_numpy(memory)
        writer.reset()
    seqs, outputs = torch.arange(8), outputs_of(8)
    derived = ring[:8].clone()
    NStep(schema, 3, 0.5, CPU).derive(ring, link, seqs, seqs, torch.tensor(8), derived, outputs)
    assert view_of(derived, schema["next_obs"])[:, 0].tolist() == [-9, -9, 5, 6, 7, 8, 8, 8]
    assert outputs.n_steps.tolist() == [2, 1, 3, 3, 3, 3, 2, 1]


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        (Schema.of(obs=OBS, next_obs=OBS, terminated="bool"), "'reward'"),
        (Schema.of(obs=OBS, next_obs=OBS, reward="float32"), "'terminated'"),
        (Schema.of(obs=OBS, reward="float32", terminated="bool", truncated="bool"), "next_X"),
        (Schema.of(obs=OBS, next_obs=OBS, reward="int32", terminated="bool"), "'reward'.*int32"),
        (Schema.of(obs=OBS, next_obs=OBS, reward="float32", terminated=("bool", 2)), "'terminated'"),
    ],
)
def test_a_schema_that_lacks_what_n_step_needs_is_refused_by_name(schema: Schema, names: str) -> None:
    """D04 among them: without a stored next value there is none to bootstrap from, and the neighbour's must never stand for it."""
    with pytest.raises(InvalidRequest, match=names):
        NStep(schema, 3, 0.99, CPU)


@pytest.mark.parametrize(("n_step", "gamma"), [(0, 0.9), (3, 1.5), (3, -0.1), (3, float("nan"))])
def test_numbers_that_make_no_return_are_refused(n_step: int, gamma: float) -> None:
    with pytest.raises(InvalidRequest, match=r"n_step|gamma"):
        NStep(USUAL, n_step, gamma, CPU)


def test_second_derive_writes_the_same_memory_and_forgets_the_first() -> None:
    stream = random_stream(5, USUAL)
    nstep, outputs = NStep(USUAL, 4, 0.5, CPU), outputs_of(6)
    memory = (outputs.discount, outputs.n_steps, outputs.bootstrap)
    addresses = [tensor.data_ptr() for tensor in memory]
    for window in [*stream.windows()][-3:]:
        seqs = random.Random(window.stop).choices(window, k=6)
        rows = derive(nstep, stream, seqs, window, outputs)
        again = outputs_of(6)
        assert torch.equal(rows, derive(NStep(USUAL, 4, 0.5, CPU), stream, seqs, window, again))
        assert torch.equal(outputs.n_steps, again.n_steps)
    assert addresses == [tensor.data_ptr() for tensor in memory]
