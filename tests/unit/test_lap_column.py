"""Promises of a lap column: what is written, what is not, what is counted; without a value read on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replay_server_client.lap_column import LARGEST_PRIORITY, REFUSED, STALE, LapColumn, Update, check_priorities, scatter
from torch import Tensor


def make_column(ring_rows: int, words: int = 2) -> LapColumn:
    return LapColumn.of(torch.zeros(ring_rows + 1, words, dtype=torch.int32))


def write(column: LapColumn, seqs: list[int], payload: Tensor, tail: int = 0, flag: int = 1, good: list[bool] | None = None) -> int:
    """Returns how many were stale."""
    update = Update.of(len(seqs), column)
    update.payload.copy_(payload.view(torch.int32).view(len(seqs), -1))
    update.is_good.copy_(torch.tensor(good if good is not None else [True] * len(seqs)))
    counts = torch.zeros(2, dtype=torch.int64)
    rows = torch.tensor(seqs)
    scatter(column, update, rows % column.ring_rows, rows, torch.tensor(tail), torch.tensor(flag), counts)
    assert counts[REFUSED] == 0
    return int(counts[STALE])


@pytest.mark.parametrize("words", [2, 3, 5])
@given(
    ring_rows=st.integers(1, 20),
    seqs=st.lists(st.integers(0, 2**30), min_size=1, max_size=30),
    tail=st.integers(0, 2**30),
    flag=st.sampled_from((0, 1, 7)),
    seed=st.integers(0, 2**16),
)
def test_due_records_are_written_and_nothing_else_changes(
    words: int, ring_rows: int, seqs: list[int], tail: int, flag: int, seed: int
) -> None:
    """Against a loop; where a row comes twice, any of its records will do."""
    random = np.random.default_rng(seed)
    column = make_column(ring_rows, words)
    before = torch.from_numpy(random.integers(-5, 5, (ring_rows + 1, words), dtype=np.int32))
    column.records.copy_(before)
    payload = torch.from_numpy(random.integers(-(2**31), 2**31, (len(seqs), words - 1), dtype=np.int32))
    good = [bool(value) for value in random.integers(0, 4, len(seqs))]
    stale = write(column, seqs, payload, tail, flag, good)
    allowed: dict[int, list[list[int]]] = {}
    for seq, values, is_good in zip(seqs, payload.tolist(), good, strict=True):
        if flag and is_good and seq >= tail:
            allowed.setdefault(seq % ring_rows, []).append([1 + seq // ring_rows, *values])
    for index in range(ring_rows):
        assert column.records[index].tolist() in allowed.get(index, [before[index].tolist()])
    assert stale == (sum(is_good and seq < tail for seq, is_good in zip(seqs, good, strict=True)) if flag else 0)


def test_a_record_of_two_words_has_its_lap_in_the_low_half_of_an_int64() -> None:
    column = make_column(4)
    write(column, [9], torch.tensor([0.75]))
    assert column.laps.tolist() == [0, 3, 0, 0]
    assert column.priorities.tolist() == [0, 0.75, 0, 0]
    bits = int(np.float32(0.75).view(np.int32))
    assert int(column.records.view(torch.int64)[1, 0]) == bits << 32 | 3


def test_the_later_of_two_updates_to_one_row_stays() -> None:
    column = make_column(4)
    write(column, [5], torch.tensor([1.0]))
    write(column, [5], torch.tensor([2.0]))
    assert (column.laps[1].item(), column.priorities[1].item()) == (2, 2.0)


def test_stale_updates_are_counted_and_not_written() -> None:
    column = make_column(4)
    assert write(column, [3, 4, 5], torch.tensor([1.0, 2.0, 3.0]), tail=5) == 2
    assert column.laps.tolist() == [0, 2, 0, 0]


def test_an_update_without_its_flag_counts_and_writes_nothing() -> None:
    column = make_column(4)
    assert write(column, [3, 4, 5], torch.tensor([1.0, 2.0, 3.0]), tail=5, flag=0) == 0
    assert not column.records[:-1].any()


def test_an_update_adds_to_what_was_counted() -> None:
    column, counts = make_column(4), torch.tensor([10, 20])
    rows = torch.tensor([0, 1])
    for _ in range(2):
        scatter(column, Update.of(2, column), rows, rows, torch.tensor(1), torch.tensor(1), counts)
    assert counts.tolist() == [12, 20]


def test_what_is_no_priority_is_refused_and_counted() -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([0.0, -0.0, 1.0, largest, 1e-45, torch.nan, torch.inf, -torch.inf, -1e-45, -1.0])
    is_good, counts = torch.zeros(10, dtype=torch.bool), torch.tensor([3, 4])
    check_priorities(values, is_good, counts)
    assert is_good.tolist() == [True] * 5 + [False] * 5
    assert counts.tolist() == [3, 9]


def test_priorities_above_the_largest_become_it() -> None:
    values = torch.tensor([1e18, 1.1e18, 3e38, torch.inf, 5.0])
    check_priorities(values, torch.zeros(5, dtype=torch.bool), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(values, torch.tensor([LARGEST_PRIORITY] * 4 + [5.0]))


def test_views_are_of_the_records_and_without_the_spare_one() -> None:
    column = make_column(6, 3)
    assert (column.ring_rows, column.laps.shape, column.payload.shape) == (6, (6,), (6, 2))
    column.records.fill_(7)
    assert (column.laps == 7).all()
    assert (column.payload == 7).all()


def test_update_reads_no_value_on_the_host() -> None:
    """The meta device has shapes and no values."""
    meta = torch.device("meta")
    column = LapColumn.of(torch.zeros(11, 2, dtype=torch.int32, device=meta))
    rows, counts = torch.zeros(4, dtype=torch.int64, device=meta), torch.zeros(2, dtype=torch.int64, device=meta)
    update = Update.of(4, column)
    check_priorities(update.priorities, update.is_good, counts)
    scatter(column, update, rows, rows, rows[0], rows[:1], counts)
    assert update.targets.shape == (4,)
