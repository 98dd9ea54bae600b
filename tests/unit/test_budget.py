"""The memory plan: counted exactly, refused before anything is taken, with the number that would fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_server_protocol.errors import BudgetExceeded, InvalidRequest
from replay_server_protocol.schema import Schema

from replay_server.budget import DEVICE_RESERVE_BYTES, HOST_RESERVE_BYTES, MemoryPlan, free_host_bytes
from replay_server.config import ServerConfig, Size
from replay_server.storage import RingLayout

SCHEMA = Schema.of(obs=("float32", 10), reward="float32")
STRIDE = 48


def plan_of(*, lanes: int = 1, is_on_device: bool = False, **options: object) -> MemoryPlan:
    return MemoryPlan.of(ServerConfig(**options), SCHEMA, lanes, is_on_device=is_on_device)  # type: ignore[arg-type]


@given(
    ring_rows=st.integers(1, 10_000),
    stride=st.integers(1, 40).map(lambda n: 16 * n),
    has_link=st.booleans(),
    has_priority=st.booleans(),
    overlay_stride=st.integers(0, 4).map(lambda n: 16 * n),
)
def test_rows_columns_and_proof_cells_never_overlap(
    ring_rows: int, stride: int, has_link: bool, has_priority: bool, overlay_stride: int
) -> None:
    layout = RingLayout.of(ring_rows, stride, has_link=has_link, has_priority=has_priority, overlay_stride=overlay_stride)
    parts = [(0, ring_rows * stride)]
    sizes = {"link": 8 * ring_rows, "priority": 8 * (ring_rows + 1), "overlay": overlay_stride * (ring_rows + 1)}
    parts += [(offset, sizes[column]) for column, offset in layout.columns.items()]
    parts += [(layout.proof_cell(ordinal), 64) for ordinal in range(64)]
    for (start, size), (following, _) in zip(parts, [*parts[1:], (layout.alloc_bytes, 0)], strict=True):
        assert start + size <= following
    assert set(layout.columns) == {n for n, has in (("link", has_link), ("priority", has_priority), ("overlay", overlay_stride)) if has}
    assert layout.proof_cell(64) == layout.proof_cell(0)
    assert all(offset % 8 == 0 for offset, _ in parts)


def test_host_bytes_of_ingress_do_not_depend_on_the_capacity() -> None:
    small, large = plan_of(capacity=4_096), plan_of(capacity=10_000_000)
    assert small.ingress_bytes == large.ingress_bytes == 2 * 512 * STRIDE
    assert large.ring_bytes - small.ring_bytes == pytest.approx((10_000_000 + 131_072 - 4_096 - 1024) * STRIDE, abs=8192)


@given(st.integers(500_000, 2**40))
def test_a_capacity_in_bytes_is_filled_and_never_exceeded(n_bytes: int) -> None:
    plan = plan_of(capacity=Size(n_bytes), columns=("link",))
    ring_rows = plan.capacity + plan.headroom
    assert ring_rows == n_bytes // (STRIDE + 8)
    assert plan.headroom >= 2 * plan.slot_rows


def test_a_capacity_in_bytes_below_the_headroom_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"hold 1,024 rows, the headroom alone needs 1,024"):
        plan_of(capacity=Size(1024 * STRIDE))


def test_options_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="--headroom"):
        plan_of(capacity=5000, headroom=100)
    with pytest.raises(InvalidRequest, match="--learning-starts"):
        plan_of(capacity=Size(2048 * STRIDE), learning_starts=2000)
    with pytest.raises(InvalidRequest, match="slot"):
        plan_of(lanes=65, slot_rows=64)


@pytest.mark.parametrize("is_on_device", [True, False])
def test_a_ring_that_does_not_fit_is_refused_with_a_capacity_that_does(is_on_device: bool) -> None:
    plan = plan_of(capacity=1_000_000, headroom=1024, is_on_device=is_on_device)
    reserve = DEVICE_RESERVE_BYTES if is_on_device else HOST_RESERVE_BYTES
    free = reserve + plan.ring_bytes // 2
    with pytest.raises(BudgetExceeded) as refused:
        plan.check(free if is_on_device else None, 2**60 if is_on_device else free)
    assert refused.value.details["needed_bytes"] == plan.ring_bytes
    assert refused.value.details["free_bytes"] == plan.ring_bytes // 2
    fits = refused.value.details["fits_rows"]
    assert isinstance(fits, int)
    assert f"{fits:,}" in str(refused.value)
    smaller = plan_of(capacity=fits, headroom=1024, is_on_device=is_on_device)
    smaller.check(free if is_on_device else None, 2**60 if is_on_device else free + smaller.ingress_bytes)
    assert plan.ring_bytes // 2 - smaller.ring_bytes < 3 * 8192


def test_the_slots_are_checked_on_their_own_when_the_ring_is_on_the_device() -> None:
    plan = plan_of(capacity=1_000_000, is_on_device=True)
    with pytest.raises(BudgetExceeded, match="slots of one collector"):
        plan.check(2**60, plan.ingress_bytes + HOST_RESERVE_BYTES - 1)
    plan.check(2**60, plan.ingress_bytes + HOST_RESERVE_BYTES)


def test_slots_that_do_not_fit_are_refused_with_the_rows_that_do() -> None:
    plan = plan_of(capacity=1_000_000, slot_rows=4096, depth=3, is_on_device=True)
    free = HOST_RESERVE_BYTES + plan.ingress_bytes // 2
    with pytest.raises(BudgetExceeded) as refused:
        plan.check(2**60, free)
    assert refused.value.details["needed_bytes"] == plan.ingress_bytes
    assert refused.value.details["free_bytes"] == plan.ingress_bytes // 2
    fits = refused.value.details["fits_rows"]
    assert isinstance(fits, int)
    assert f"--slot-rows of {fits:,}" in str(refused.value)
    plan_of(capacity=1_000_000, slot_rows=fits, depth=3, is_on_device=True).check(2**60, free)
    more = plan_of(capacity=1_000_000, slot_rows=fits + 1, depth=3, is_on_device=True)
    with pytest.raises(BudgetExceeded):
        more.check(2**60, free)


def test_the_lines_of_a_dry_run_name_ring_and_host_bytes() -> None:
    plan = plan_of(capacity=10_000)
    text = "\n".join(plan.lines())
    for number in (plan.ring_bytes, plan.ingress_bytes, 64 * plan.ingress_bytes, plan.capacity, plan.headroom):
        assert f"{number:,}" in text


def test_some_host_memory_is_free() -> None:
    assert 0 < free_host_bytes() < 2**60
