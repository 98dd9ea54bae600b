"""Shares of a mixed batch are whole rows that add up, whatever they are changed to; the parts are copied with all that belongs to them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from replay_server_client.batch import Batch
from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.mixed import MixedSampler
from replay_server_client.request import Request
from replay_server_client.sampler import Sampler
from replay_server_protocol.errors import InvalidRequest, ReplayTimeout
from replay_server_protocol.schema import Schema

SCHEMA = Schema.of(who="int64", number="int32")
CPU = torch.device("cpu")


class FakeSampler:
    """Batches whose every row says whose it is and how many batches came before."""

    def __init__(self, who: int, request: Request, schema: Schema = SCHEMA) -> None:
        self.request = request
        self.counted_rows = request.rows
        self.taken: list[int] = []
        self.fails = False
        self._who = who
        self._memory = BatchBuffer(0, schema, request, CPU)

    def sample(self, *, timeout: float | None = 5.0) -> Batch:
        if self.fails:
            raise ReplayTimeout("late")
        memory = self._memory
        memory.fields["who"].fill_(self._who)
        memory.fields["number"].fill_(len(self.taken))
        for result in memory.results.values():
            numbers = torch.arange(len(result)).view(-1, *[1] * (result.dim() - 1)) + 100 * self._who
            result.copy_(numbers if result.dtype != torch.bool else torch.ones((), dtype=torch.bool))
        self.taken.append(self.counted_rows)
        return Batch(memory, len(self.taken), (0, 10))


def mix(*shares: float, n: int = 10, request: Request | None = None) -> tuple[MixedSampler, list[FakeSampler]]:
    fakes = [FakeSampler(who, request or Request.transitions(n)) for who in range(len(shares))]
    return MixedSampler([(cast(Sampler, fake), share) for fake, share in zip(fakes, shares, strict=True)]), fakes


share = st.one_of(st.just(0.0), st.floats(1e-6, 1.0), st.sampled_from([1 / 3, 0.5, 1e-9]))
shares_of_six = st.lists(share, min_size=6, max_size=6).filter(lambda shares: sum(shares) > 0)

OVERDRAWN = [[0.5, 1, 0.01, 0, 0.01, 0.01], [0.5, 0.01, 0.5, 0.5, 0.5, 1], [0.01, 0.5, 0.01, 0.01, 0, 0.01], [1, 0.01, 0.01, 1, 0.01, 0]]
"""At the last call the whole rows due sum up to one too many, and the part that is farthest ahead of its share has none to give back."""


@given(n=st.integers(1, 9), calls=st.lists(shares_of_six, min_size=1, max_size=25))
@example(n=3, calls=OVERDRAWN)
def test_parts_add_up_and_a_part_without_a_share_gives_no_row(n: int, calls: list[list[float]]) -> None:
    mixed, fakes = mix(*[1.0] * 6, n=n)
    for shares in calls:
        before = [len(fake.taken) for fake in fakes]
        batch = mixed.sample(shares=shares)
        sizes = [rows.stop - rows.start for _, rows in batch.parts]
        assert sum(sizes) == n
        assert min(sizes) > 0
        for fake, asked, share in zip(fakes, before, shares, strict=True):
            assert len(fake.taken) == asked or share > 0


@given(n=st.integers(1, 9), shares=shares_of_six)
def test_over_the_calls_every_part_gets_its_share_to_a_row(n: int, shares: list[float]) -> None:
    mixed, _ = mix(*shares, n=n)
    got = torch.zeros(6)
    for call in range(1, 40):
        got += torch.bincount(mixed.sample()["who"], minlength=6)
        expected = torch.tensor(shares, dtype=torch.float64) / sum(shares) * n * call
        assert float((got - expected).abs().max()) < 1.01 + 1e-6 * call


def test_rows_count_as_sampled_by_what_is_taken() -> None:
    mixed, (a, b) = mix(0.3, 0.7, request=Request.sequences(10, length=4, burn_in=0, stride=1, crosses_episodes=False))
    for _ in range(3):
        mixed.sample()
    assert (a.taken, b.taken) == ([12] * 3, [28] * 3)


@pytest.mark.parametrize("kind", ["one step", "n-step", "sequences"])
def test_all_results_come_along_with_their_rows(kind: str) -> None:
    request = Request.transitions(6, n_step=3 if kind == "n-step" else 1)
    if kind == "sequences":
        request = Request.sequences(6, length=3, burn_in=1, stride=1, crosses_episodes=False)
    mixed, _ = mix(0.5, 0.5, request=request)
    batch = mixed.sample()
    assert batch["who"].view(6, -1)[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    for name, result in batch.memory().results.items():
        expected = [1] * 6 if result.dtype == torch.bool else [0, 1, 2, 100, 101, 102]
        assert result.view(6, -1)[:, 0].tolist() == expected, name


def test_batches_alternate_between_two_memories_and_end_with_the_next() -> None:
    mixed, _ = mix(1, 1)
    batches = [mixed.sample() for _ in range(2)]
    first, second = (mixed.sample()["who"].data_ptr() for _ in range(2))
    assert first != second
    assert mixed.sample()["who"].data_ptr() == first
    with pytest.raises(InvalidRequest, match="ended"):
        batches[1]["who"]


def test_after_a_part_was_late_the_next_call_goes_on() -> None:
    mixed, (_, b) = mix(0.5, 0.5)
    b.fails = True
    with pytest.raises(ReplayTimeout):
        mixed.sample()
    b.fails = False
    assert torch.bincount(mixed.sample()["who"]).tolist() == [5, 5]


def test_samplers_that_would_not_fit_in_one_batch_are_refused() -> None:
    sequences: dict[str, Any] = {"length": 4, "burn_in": 0, "stride": 1, "crosses_episodes": False}
    for one, other in (
        (Request.transitions(8), Request.transitions(9)),
        (Request.transitions(8), Request.transitions(8, n_step=2)),
        (Request.transitions(8), Request.transitions(8, gamma=0.5)),
        (Request.transitions(8), Request.sequences(8, **sequences)),
        (Request.sequences(8, **sequences), Request.sequences(8, **{**sequences, "burn_in": 1})),
    ):
        with pytest.raises(InvalidRequest, match="one n, n_step, gamma, length and burn_in"):
            MixedSampler([(cast(Sampler, FakeSampler(0, one)), 1), (cast(Sampler, FakeSampler(1, other)), 1)])
    twice = cast(Sampler, FakeSampler(0, Request.transitions(8)))
    with pytest.raises(InvalidRequest, match="two or more samplers"):
        MixedSampler([(twice, 1), (twice, 1)])


@pytest.mark.parametrize("shares", [(), (1,), (0, 0), (-1, 2), (float("nan"), 1), (float("inf"), 1), (1, 1, 1)])
def test_shares_that_are_none_are_refused_and_change_nothing(shares: tuple[float, ...]) -> None:
    mixed, _ = mix(0.2, 0.8)
    before = mixed.sample()
    with pytest.raises(InvalidRequest, match="shares="):
        mixed.sample(shares=shares)
    assert torch.bincount(before["who"]).tolist() == [2, 8]
    assert torch.bincount(mixed.sample()["who"]).tolist() == [2, 8]


def test_priorities_of_another_number_are_refused() -> None:
    mixed, _ = mix(1, 1)
    with pytest.raises(InvalidRequest, match="10 draws"):
        mixed.update_priorities(mixed.sample(), torch.ones(9))
