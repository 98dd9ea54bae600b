"""What may be read under a lease: exactly the newest capacity rows. What learners draw of them is in conformance/replay.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from replay_server_client import Collector, InvalidRequest, Learner, Schema
from support.rarely import rarely
from support.raw_client import RawLearner
from support.reports import assert_conserved, report_of
from support.servers import ServerProcess

SCHEMA = Schema.of(mark="int64")
CAPACITY = 37


def marks(first: int, end: int) -> dict[str, object]:
    return {"mark": np.arange(first, end)}


@pytest.mark.parametrize("chunk", [5, *rarely(1, 16, 23)])
def test_the_ring_holds_exactly_the_window_that_a_grant_names(start_server: Callable[..., ServerProcess], chunk: int) -> None:
    server = start_server("--capacity", str(CAPACITY), "--slot-rows", "8", "--headroom", "16")
    written = 0
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
        collector.write(marks(0, 1))
        written = collector.flush()
        with RawLearner(server.endpoints) as raw:
            for number, count in enumerate((1, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY, 5 * CAPACITY + 11), 1):
                while written < count:
                    n = min(chunk, count - written)
                    collector.write(marks(written, written + n))
                    written += n
                assert collector.flush() == count
                grant, values = raw.window(number, "mark", min_committed=count)
                assert (grant.tail, grant.committed) == (max(0, count - CAPACITY), count)
                assert values.tolist() == list(range(grant.tail, count))
    assert_conserved(report_of(server))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_batch_above_the_capacity_fails_at_once_with_both_numbers(start_server: Callable[..., ServerProcess], prefetch: int) -> None:
    server = start_server("--capacity", "37", "--slot-rows", "8", "--headroom", "16")
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=prefetch) as learner,
    ):
        with pytest.raises(InvalidRequest, match=r"38.*37"):
            learner.sample(38, timeout=60)
        collector.write(marks(0, 40))
        collector.flush()
        with pytest.raises(InvalidRequest, match=r"38.*37"):
            learner.sample(38, timeout=60)
        assert len(learner.sample(37)) == 37
