from __future__ import annotations

import math
import time

import pytest
from replay_server_client.deadline import Deadline
from replay_server_protocol.errors import InvalidRequest
from support.clock import FakeClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_deadline_passes_exactly_at_its_end(clock: FakeClock) -> None:
    deadline = Deadline(2.0)
    clock.advance(1.5)
    assert (deadline.remaining_s, deadline.elapsed_s, deadline.has_passed) == (0.5, 1.5, False)
    clock.advance(0.5)
    assert (deadline.remaining_s, deadline.elapsed_s, deadline.has_passed) == (0.0, 2.0, True)
    clock.advance(10)
    assert deadline.remaining_s == 0.0


def test_zero_has_passed_at_once(clock: FakeClock) -> None:
    assert Deadline(0).has_passed


def test_none_never_passes(clock: FakeClock) -> None:
    deadline = Deadline(None)
    clock.advance(1e6)
    assert deadline.remaining_s == math.inf
    assert not deadline.has_passed
    assert deadline.elapsed_s == 1e6


@pytest.mark.parametrize("timeout_s", [-0.001, -math.inf, math.nan])
def test_timeout_that_is_no_wait_is_refused_with_its_value(timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match=f"timeout={timeout_s!r}: seconds, at least 0, or None"):
        Deadline(timeout_s)


@pytest.mark.parametrize("timeout", ["1", [1.0], 1j])
def test_a_timeout_that_is_no_number_is_refused_by_name(timeout: object) -> None:
    with pytest.raises(InvalidRequest, match="timeout="):
        Deadline(timeout)  # type: ignore[arg-type]
