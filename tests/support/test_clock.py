from __future__ import annotations

import pytest
from support.clock import FakeClock


def test_clock_stands_still_until_advanced() -> None:
    clock = FakeClock(start_ns=5_000_000_000)
    assert (clock(), clock.now_ns, clock.monotonic_ns()) == (5.0, 5_000_000_000, 5_000_000_000)
    clock.advance(0.25)
    clock.advance_ns(1)
    assert clock.now_ns == 5_250_000_001
    assert clock() == pytest.approx(5.25)


def test_clock_refuses_to_go_back_and_keeps_its_time() -> None:
    clock = FakeClock(start_ns=7)
    with pytest.raises(ValueError, match="never goes back"):
        clock.advance(-1)
    assert clock.now_ns == 7
