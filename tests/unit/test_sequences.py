"""Windows of a lane's rows are the naive ones: they end with the episode, or say where the next begins, and at cuts and the newest row."""

from __future__ import annotations

import random

import pytest
import torch
from replay_server_client.sequences import WindowOutputs, Windows
from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.schema import Schema
from support.streams import Row, Stream, random_stream

CPU = torch.device("cpu")
SCHEMAS = {
    "usual": Schema.of(seq="int64", terminated="bool", truncated="bool"),
    "no truncated": Schema.of(seq="int64", terminated="float32"),
    "first": Schema.of(terminated="uint8", seq="int64", truncated="int16", first="bool"),
}


def outputs_of(n: int, length: int) -> WindowOutputs:
    ints, bools = torch.full((2, n, length), -1), torch.ones((2, n, length), dtype=torch.bool)
    return WindowOutputs(ints[0], ints[1], bools[0], bools[1])


def derive(windows: Windows, stream: Stream, seqs: list[int], window: range, outputs: WindowOutputs) -> None:
    ring, link = stream.with_garbage_outside(window)
    first = torch.tensor(seqs)
    windows.derive(ring, link, first % stream.ring_rows, first, torch.tensor(window.stop), outputs)


def begins(lane: list[Row], step: int, stride: int, has_first: bool) -> bool:
    if step == 0:
        return True
    passed = lane[(step - 1) * stride : step * stride + 1]
    return any(row.has_ended for row in passed[:-1]) or (has_first and any(row.is_first for row in passed[1:]))


@pytest.mark.parametrize("crosses", [False, True], ids=["in-episode", "crossing"])
@pytest.mark.parametrize(("length", "stride"), [(1, 1), (2, 1), (5, 1), (9, 1), (1, 3), (4, 2), (3, 4)])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_row_of_every_window_starts_the_naive_sequence(schema: Schema, length: int, stride: int, crosses: bool) -> None:
    for seed in range(3):
        stream = random_stream(seed, schema, has_big_slots=seed % 2 == 0)
        for window in stream.windows():
            outputs = outputs_of(len(window), length)
            derive(Windows(schema, length, 0, stride, crosses), stream, list(window), window, outputs)
            for i, seq in enumerate(window):
                lane = stream.chain(seq, window.stop, (length - 1) * stride + 1, crosses=crosses)
                kept = lane[::stride]
                missing = length - len(kept)
                assert outputs.seqs[i].tolist() == [row.seq for row in kept] + [kept[-1].seq] * missing
                assert outputs.mask[i].tolist() == [True] * len(kept) + [False] * missing
                firsts = [begins(lane, step, stride, "first" in schema.roles) for step in range(len(kept))]
                assert outputs.is_first[i].tolist() == firsts + [False] * missing
            assert torch.equal(outputs.indices, outputs.seqs % stream.ring_rows)


def test_thousands_of_lanes_in_slots_of_one_step_keep_apart() -> None:
    schema, lanes, length = SCHEMAS["usual"], 4096, 3
    stream = Stream(schema, 4 * lanes, lanes, random.Random(0), lanes=(lanes,))
    for _ in range(3):
        stream.write(1, is_plain=True, p_end=0)
    outputs = outputs_of(lanes, length)
    derive(Windows(schema, length, 0, 1, False), stream, list(range(lanes)), range(3 * lanes), outputs)
    assert torch.equal(outputs.seqs, torch.arange(lanes)[:, None] + lanes * torch.arange(length))
    assert outputs.mask.all()


def test_a_first_row_ends_a_window_though_no_row_ended_its_episode() -> None:
    """An environment that was reset in mid-episode: its collector says first, but nobody said terminated or truncated."""
    schema = Schema.of(terminated="bool", first="bool")
    stream = Stream(schema, 8, 4, random.Random(0))
    stream.write(4, is_plain=True, p_end=0)
    stream.ring[2, schema["first"].offset] = 1
    for crosses, mask, is_first in ((False, [1, 1, 0, 0], [1, 0, 0, 0]), (True, [1, 1, 1, 1], [1, 0, 1, 0])):
        outputs = outputs_of(1, 4)
        derive(Windows(schema, 4, 0, 1, crosses), stream, [0], range(4), outputs)
        assert outputs.mask[0].tolist() == mask
        assert outputs.is_first[0].tolist() == is_first


def test_crossing_windows_need_no_role() -> None:
    schema = Schema.of(seq="int64")
    stream = Stream(schema, 8, 4, random.Random(0))
    stream.write(4, is_plain=True, p_end=1)
    outputs = outputs_of(2, 3)
    derive(Windows(schema, 3, 0, 1, True), stream, [0, 2], range(4), outputs)
    assert outputs.seqs.tolist() == [[0, 1, 2], [2, 3, 3]]
    assert outputs.is_first.tolist() == [[True, False, False]] * 2


def test_a_schema_without_terminated_is_refused_by_name_unless_windows_cross() -> None:
    with pytest.raises(InvalidRequest, match="'terminated'"):
        Windows(Schema.of(truncated="bool"), 8, 0, 1, False)
    with pytest.raises(InvalidRequest, match="'first'"):
        Windows(Schema.of(first=("bool", 2)), 8, 0, 1, True)


@pytest.mark.parametrize(("length", "burn_in", "stride"), [(0, 0, 1), (4, 4, 1), (4, -1, 1), (4, 0, 0)])
def test_numbers_that_make_no_window_are_refused(length: int, burn_in: int, stride: int) -> None:
    with pytest.raises(InvalidRequest, match="sequences"):
        Windows(SCHEMAS["usual"], length, burn_in, stride, False)


def test_second_derive_writes_the_same_memory_and_forgets_the_first() -> None:
    schema = SCHEMAS["first"]
    stream = random_stream(4, schema)
    windows, outputs = Windows(schema, 5, 2, 2, True), outputs_of(6, 5)
    memory = (outputs.indices, outputs.seqs, outputs.mask, outputs.is_first)
    addresses = [tensor.data_ptr() for tensor in memory]
    for window in [*stream.windows()][-3:]:
        seqs, again = random.Random(window.stop).choices(window, k=6), outputs_of(6, 5)
        derive(windows, stream, seqs, window, outputs)
        derive(Windows(schema, 5, 2, 2, True), stream, seqs, window, again)
        assert all(map(torch.equal, memory, (again.indices, again.seqs, again.mask, again.is_first)))
    assert addresses == [tensor.data_ptr() for tensor in memory]
