"""A walk finds exactly the rows its lane wrote next: whatever collectors, lanes, masks, cuts and wraps do, and whatever lies outside."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from replay_server_client.walk import Chains, flag_columns, follow, keep
from replay_server_protocol.schema import Schema
from support.streams import GARBAGE_LINKS, Row, Stream, random_stream
from torch import Tensor

SCHEMA = Schema.of(seq="int64", terminated="bool", truncated="bool")
ENDS = [SCHEMA["terminated"], SCHEMA["truncated"]]


def walk(
    link: Tensor,
    seqs: Tensor,
    committed: int,
    has_ended: Sequence[Tensor] = (),
    is_first: Sequence[Tensor] = (),
    *,
    steps: int,
    stride: int = 1,
) -> Chains:
    trail = follow(link, seqs % len(link), torch.tensor(committed), has_ended, is_first, rows=(steps - 1) * stride + 1)
    return keep(trail, seqs, stride)


def padded(kept: list[Row], steps: int) -> list[int]:
    return [row.seq for row in kept] + [kept[-1].seq] * (steps - len(kept))


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("crosses", [False, True], ids=["in-episode", "crossing"])
@pytest.mark.parametrize("seed", range(8))
def test_walks_from_every_row_of_every_window_find_the_naive_chain(seed: int, crosses: bool, stride: int) -> None:
    stream, steps = random_stream(seed, SCHEMA, has_big_slots=seed % 2 == 0), random.Random(seed).randint(1, 6)
    for window in stream.windows():
        ring, link = stream.with_garbage_outside(window)
        has_ended = [] if crosses else flag_columns(ring, ENDS)
        chains = walk(link, torch.tensor(window), window.stop, has_ended, steps=steps, stride=stride)
        for column, seq in enumerate(window):
            kept = stream.chain(seq, window.stop, (steps - 1) * stride + 1, crosses=crosses)[::stride]
            assert chains.seqs[:, column].tolist() == padded(kept, steps)
            assert chains.is_alive[:, column].tolist() == [step < len(kept) for step in range(steps)]
        assert torch.equal(chains.indices, chains.seqs % stream.ring_rows)


@pytest.mark.parametrize("link", GARBAGE_LINKS)
@pytest.mark.parametrize("committed", [10, 2**40])
def test_a_garbage_link_inside_the_window_is_none_or_a_later_row_of_it(link: int, committed: int) -> None:
    """Half-written links; a link to the row itself; links to rows that are older, or not yet committed."""
    ring_rows, steps = 8, 5
    window = range(committed - 6, committed)
    seqs = torch.tensor(list(window))
    chains = walk(torch.full((ring_rows,), link), seqs, committed, steps=steps)
    for column, seq in enumerate(window):
        following = seq + (link - seq) % ring_rows
        is_none = not 0 <= link < ring_rows or not seq < following < committed
        after = seq if is_none else following
        assert chains.seqs[:, column].tolist() == [seq] + [after] * (steps - 1)
        assert chains.is_alive[:, column].tolist() == [True, not is_none] + [False] * (steps - 2)


def test_a_link_is_read_in_a_ring_without_headroom() -> None:
    """The window is the whole ring: the row after the newest has the index of the oldest."""
    seqs = torch.arange(4, 8)
    chains = walk(torch.tensor([1, 2, 3, 0]), seqs, 8, steps=6)
    assert chains.seqs.T.tolist() == [[4, 5, 6, 7, 7, 7], [5, 6, 7, 7, 7, 7], [6, 7, 7, 7, 7, 7], [7] * 6]


def test_a_row_that_ended_its_episode_is_the_last_and_a_first_row_is_never_reached() -> None:
    link, seqs = torch.tensor([1, 2, 3, 4, 5, -1]), torch.tensor([0, 3])
    flags = torch.zeros(6, dtype=torch.bool)
    flags[2] = True
    chains = walk(link, seqs, 6, [flags], steps=4)
    assert chains.seqs.T.tolist() == [[0, 1, 2, 2], [3, 4, 5, 5]]
    chains = walk(link, seqs, 6, [], [flags], steps=4)
    assert chains.seqs.T.tolist() == [[0, 1, 1, 1], [3, 4, 5, 5]]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "uint16", "uint32", "uint64", "int64", "float16", "bfloat16", "float64"])
def test_an_episode_ends_where_a_flag_of_any_dtype_is_not_zero(dtype: str) -> None:
    schema = Schema.of(pad="uint8", terminated=dtype, truncated=dtype)
    stream = Stream(schema, 12, 4, random.Random(3))
    while stream.reserved < 12:
        stream.write(4, is_plain=True, p_end=0.4)
    assert any(row.is_truncated for row in stream.rows)
    assert any(row.is_terminated for row in stream.rows)
    columns = flag_columns(stream.ring, [schema["terminated"], schema["truncated"]])
    chains = walk(stream.link, torch.arange(12), 12, columns, steps=5)
    for seq in range(12):
        assert chains.seqs[:, seq].tolist() == padded(stream.chain(seq, 12, 5), 5)


def test_two_adjacent_bytes_are_one_column_and_others_are_not() -> None:
    rows = torch.zeros((3, 16), dtype=torch.uint8)
    adjacent, odd = Schema.of(terminated="bool", truncated="bool"), Schema.of(a="uint8", terminated="bool", truncated="bool")
    assert [len(flag_columns(rows, [s["truncated"], s["terminated"]])) for s in (adjacent, odd)] == [1, 2]
