"""Copies that take long: nothing is seen half copied, no slot is used again early, and waits say that copies are in flight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from replay_server_client import Collector, ReplayTimeout
from support.markers import MARKERS, is_whole, marker_steps
from support.raw_client import RawLearner
from support.servers import ServerProcess

DELAY_S = 0.02


def test_rows_are_whole_and_in_order_while_every_copy_is_torn_for_a_while(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "40", "--slot-rows", "8", "--headroom", "16", "--debug-copy-delay", str(DELAY_S))
    steps = 200
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector, RawLearner(server.endpoints) as learner:
        for number, step in enumerate(range(0, steps, 8), 1):
            collector.write(marker_steps(0, 1, step, 8))  # refills a slot as soon as it has its credit
            if step < 8:
                collector.flush()
            grant = learner.grant(number)
            rows = {name: learner.read(name, grant.tail, grant.committed) for name in MARKERS.names}
            learner.release(grant)
            assert is_whole(rows).all()
            assert rows["step"].tolist() == list(range(grant.tail, grant.committed))
        assert collector.flush() == steps


def test_credits_run_out_while_copies_are_in_flight_and_the_wait_says_so(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "100", "--slot-rows", "8", "--debug-copy-delay", "1")
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector:
        with pytest.raises(ReplayTimeout, match=r"slots? being copied") as late:
            collector.write(marker_steps(0, 1, 0, 32), timeout=0.1)
        assert late.value.rows_written == 16
        assert collector.statistics().free_slots == 0
        collector.write(marker_steps(0, 1, 16, 16), timeout=5)
        assert collector.flush() == 32
