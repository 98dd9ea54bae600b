from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.moments import Moments, pack_scalars

Rows = npt.NDArray[np.float64]
rows = hnp.arrays(np.float64, st.tuples(st.integers(1, 30), st.just(3)), elements=st.floats(-1e6, 1e6))


def assert_close(moments: Moments, values: Rows) -> None:
    """Within rounding of numpy over all rows at once; the scale is that of the values, since a mean may cancel."""
    scale = max(1.0, float(np.abs(values).max()))
    assert moments.count == len(values)
    np.testing.assert_allclose(moments.mean, values.mean(0), rtol=1e-12, atol=1e-12 * scale)
    np.testing.assert_allclose(moments.std, values.std(0), rtol=1e-9, atol=1e-7 * scale)
    np.testing.assert_array_equal(moments.low, values.min(0))
    np.testing.assert_array_equal(moments.high, values.max(0))


@given(rows)
def test_moments_are_numpys(values: Rows) -> None:
    assert_close(Moments.of(values), values)


@given(st.lists(rows, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_merging_parts_in_any_order_gives_the_whole(parts: list[Rows], random: object) -> None:
    whole = np.concatenate(parts)
    shuffled = list(parts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for order in (parts, shuffled):
        merged = Moments.empty(3)
        for part in order:
            merged.merge(Moments.of(part))
        assert_close(merged, whole)


def test_small_spread_far_from_zero_is_not_lost() -> None:
    values = 1e9 + np.arange(2_000, dtype=np.float64).reshape(-1, 1) % 7
    merged = Moments.empty(1)
    for part in np.array_split(values, 13):
        merged.merge(Moments.of(part))
    assert merged.std[0] == pytest.approx(values.std(), rel=1e-9)


@given(rows)
def test_merging_nothing_changes_nothing(values: Rows) -> None:
    merged = Moments.of(values)
    before = merged.pack()
    merged.merge(Moments.empty(3))
    assert merged.pack() == before
    from_empty = Moments.empty(3)
    from_empty.merge(Moments.of(values))
    assert from_empty.count == len(values)
    np.testing.assert_array_equal(from_empty.mean, merged.mean)
    np.testing.assert_array_equal(from_empty.squares, merged.squares)


def test_empty_moments_have_no_spread_and_an_open_range() -> None:
    empty = Moments.empty(2)
    assert (empty.count, empty.std.tolist(), empty.low.tolist(), empty.high.tolist()) == (0, [0, 0], [np.inf, np.inf], [-np.inf, -np.inf])
    assert Moments.unpack(empty.pack(), 2).count == 0


def test_merge_leaves_the_other_as_it_was() -> None:
    other = Moments.of(np.ones((4, 2)))
    before = other.pack()
    Moments.of(np.zeros((4, 2))).merge(other)
    assert other.pack() == before


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64, np.float16, np.float32])
def test_every_dtype_and_shape_is_taken_as_float64_elements(dtype: type[np.generic]) -> None:
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    moments = Moments.of(values)
    assert moments.mean.dtype == np.float64
    assert_close(moments, values.reshape(2, -1).astype(np.float64))


def test_float32_sums_do_not_round_in_float32() -> None:
    values = np.full((100_000, 1), 0.1, np.float32)
    assert Moments.of(values).mean[0] == pytest.approx(np.float64(np.float32(0.1)), rel=1e-14)


@given(rows)
def test_packed_moments_come_back_bit_for_bit(values: Rows) -> None:
    packed = Moments.of(values).pack()
    assert len(packed) == 8 + 32 * 3
    again = Moments.unpack(packed, 3)
    assert again.pack() == packed
    again.merge(again)  # its arrays are its own, not views of the message
    assert again.count == 2 * len(values)


@pytest.mark.parametrize("n_bytes", [0, 7, 8, 103, 105])
def test_wrong_length_is_a_violation(n_bytes: int) -> None:
    with pytest.raises(ProtocolViolation, match=f"have 104 bytes, {n_bytes} came"):
        Moments.unpack(bytes(n_bytes), 3)


@pytest.mark.parametrize(
    ("mean", "squares", "low", "high"),
    [
        (np.nan, 0, 0, 0),
        (np.inf, 0, 0, 0),
        (0, -1, 0, 0),
        (0, np.nan, 0, 0),
        (0, 0, np.nan, 0),
        (0, 0, 0, np.nan),
        (0, 0, -np.inf, 0),
        (0, 0, 1, 0),
    ],
)
def test_values_that_no_finite_rows_have_are_a_violation(mean: float, squares: float, low: float, high: float) -> None:
    with pytest.raises(ProtocolViolation, match="moments must be finite"):
        Moments.unpack(struct.pack("<Qdddd", 1, mean, squares, low, high), 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.bool_])
@pytest.mark.parametrize("n", [1, 2, 16, 17, 500])
def test_scalars_are_packed_as_their_moments_are(n: int, dtype: type[np.generic]) -> None:
    values = np.random.default_rng(n).normal(3, 20, n).astype(dtype)
    packed = pack_scalars(values)
    assert packed is not None
    assert_close(Moments.unpack(packed, 1), values.reshape(n, 1).astype(np.float64))


@pytest.mark.parametrize("n", [2, 16, 17])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_scalars_of_which_one_is_not_finite_have_no_moments(n: int, odd: float) -> None:
    values = np.ones(n)
    values[-1] = odd
    assert pack_scalars(values) is None
    values[0] = -odd
    assert pack_scalars(values) is None


@pytest.mark.parametrize("n", [2, 16, 17])
def test_scalars_beyond_float64_in_sum_have_no_moments_and_in_squares_the_largest(n: int) -> None:
    largest = np.finfo(np.float64).max
    assert pack_scalars(np.full(n, largest)) is None
    far = np.array([largest / 2, -largest / 2, *np.zeros(n - 2)])
    packed = pack_scalars(far)
    assert packed is not None
    assert Moments.unpack(packed, 1).squares.tolist() == [largest]
