"""Sums, waits, rates and running moments, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.moments import Moments
from replay_server_protocol.schema import Schema

from replay_server.counters import WAIT_BOUNDS_S, Latency, Rates, Tally

SCHEMA = Schema.of(reward="float32", obs=("float64", 3))
VALUES = st.floats(-1e6, 1e6, width=32)


@given(st.lists(st.lists(VALUES, min_size=1, max_size=20), min_size=1, max_size=20))
def test_a_scalar_tally_agrees_with_numpy_over_all_rows(parts: list[list[float]]) -> None:
    tally = Tally(SCHEMA["reward"])
    for part in parts:
        tally.merge(tally.read(Moments.of(np.array(part, np.float32)).pack()))
    every = np.concatenate([np.array(part, np.float32) for part in parts]).astype(np.float64)
    report = tally.report()
    assert (report["count"], report["min"], report["max"]) == (len(every), every.min(), every.max())
    assert report["mean"] == pytest.approx(every.mean(), rel=1e-9, abs=1e-6)
    assert report["std"] == pytest.approx(every.std(), rel=1e-6, abs=1e-4)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=10), st.integers(0, 2**32 - 1))
def test_a_wide_tally_agrees_with_numpy_element_by_element(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tally, every = Tally(SCHEMA["obs"]), []
    for size in sizes:
        every.append(rng.normal(5, 100, (size, 3)))
        tally.merge(tally.read(Moments.of(every[-1]).pack()))
    rows, report = np.concatenate(every), tally.report()
    assert report["count"] == len(rows)
    for name, expected in (("mean", rows.mean(0)), ("std", rows.std(0)), ("min", rows.min(0)), ("max", rows.max(0))):
        np.testing.assert_allclose(report[name], expected, rtol=1e-9, atol=1e-9)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["reward", "obs"])
def test_before_the_first_row_a_tally_reports_nulls(name: str) -> None:
    tally = Tally(SCHEMA[name])
    tally.merge(tally.read(Moments.empty(SCHEMA[name].elements).pack()))
    assert tally.report() == {"count": 0, "mean": None, "std": None, "min": None, "max": None}


@pytest.mark.parametrize(("name", "elements"), [("reward", 1), ("obs", 3)])
@pytest.mark.parametrize("spoil", ["mean", "squares", "low", "high", "negative squares", "length"])
def test_moments_that_can_not_be_are_refused(name: str, elements: int, spoil: str) -> None:
    moments = Moments.of(np.ones((2, elements)))
    if spoil == "negative squares":
        moments.squares[0] = -1
    elif spoil != "length":
        getattr(moments, spoil)[0] = math.nan
    packed = moments.pack() + (b"x" if spoil == "length" else b"")
    with pytest.raises(ProtocolViolation):
        Tally(SCHEMA[name]).read(packed)


def test_latency_keeps_the_last_waits_and_names_their_percentiles() -> None:
    latency = Latency()
    assert latency.percentiles_us() == {"p50": None, "p99": None}
    for waited_us in range(1, 101):
        latency.note(waited_us * 1000)
    assert latency.percentiles_us() == {"p50": 51.0, "p99": 100.0}
    for _ in range(5000):
        latency.note(7000)
    assert latency.percentiles_us() == {"p50": 7.0, "p99": 7.0}


def test_the_histogram_of_a_latency_counts_every_wait_once_below_its_bound() -> None:
    latency = Latency()
    waits_ns = [0, 1023, 1024, 2047, 2048, 10**9, 2**34 - 1, 2**34, 2**40]
    for waited_ns in waits_ns:
        latency.note(waited_ns)
    counts = latency.histogram()["counts"]
    assert isinstance(counts, list)
    assert len(counts) == len(WAIT_BOUNDS_S) + 1
    assert latency.histogram()["sum_s"] == sum(waits_ns) / 1e9
    for place, bound_s in enumerate(WAIT_BOUNDS_S):
        assert sum(counts[: place + 1]) == sum(waited_ns / 1e9 < bound_s for waited_ns in waits_ns), bound_s
    assert sum(counts) == len(waits_ns)


def test_rates_are_those_of_the_last_seconds() -> None:
    rates = Rates()
    rates.note(0.0, 0, 0)
    assert rates.per_second() == (0.0, 0.0)
    for tenth in range(1, 201):
        rates.note(tenth / 10, 100 * tenth, tenth)
    assert rates.per_second() == pytest.approx((1000.0, 10.0))
    for tenth in range(201, 301):
        rates.note(tenth / 10, 20_000, 200)
    assert rates.per_second() == pytest.approx((0.0, 0.0))


def test_rates_before_the_first_note_are_none_yet() -> None:
    assert Rates().per_second() == (0.0, 0.0)


def test_sums_that_rates_begin_with_are_no_traffic() -> None:
    rates = Rates()
    rates.note(0.0, 0, 0)
    rates.begin(1.0, 8600, 1080)
    assert rates.per_second() == (0.0, 0.0)
    rates.note(3.0, 8610, 1080)
    assert rates.per_second() == (5.0, 0.0)
