"""The server is stopped by SIGSTOP: every wait of a client ends in time with a typed error, and nothing is lost or doubled afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from replay_server_client import Collector, Learner, ReplayError, ReplayTimeout, ServerGone
from support.freeze import frozen
from support.markers import MARKERS, marker_steps
from support.raw_client import RawLearner
from support.reports import assert_conserved, report_of
from support.servers import ServerProcess


def raises_in_time(error: type[ReplayError], timeout_s: float, call: Callable[[], object]) -> None:
    before = time.monotonic()
    with pytest.raises(error):
        call()
    assert timeout_s <= time.monotonic() - before < timeout_s + 0.2


def test_every_wait_ends_in_time_and_all_goes_on_afterwards(server: ServerProcess) -> None:
    with (
        Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, device="cpu", run_dir=server.run_dir, prefetch=0) as learner,
    ):
        collector.write(marker_steps(0, 1, 0, 16))
        collector.flush()
        learner.sample(8)
        with frozen(server.child):
            with pytest.raises(ReplayTimeout) as late:
                collector.write(marker_steps(0, 1, 16, 80), timeout=0.3)
            assert late.value.rows_written == 32
            raises_in_time(ReplayTimeout, 0.3, lambda: collector.flush(0.3))
            raises_in_time(ReplayTimeout, 0.3, lambda: learner.sample(8, timeout=0.3))
            raises_in_time(ReplayTimeout, 0.3, lambda: learner.wait_ready(0.3))
            raises_in_time(ReplayTimeout, 0.3, lambda: collector.latest("policy", timeout=0.3))
            raises_in_time(ServerGone, 0.3, lambda: report_of(server, 0.3))
            raises_in_time(ServerGone, 0.3, lambda: Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir, timeout=0.3))
            raises_in_time(ServerGone, 0.3, lambda: Learner.connect(server.name, device="cpu", run_dir=server.run_dir, timeout=0.3))
        collector.write(marker_steps(0, 1, 48, 48))
        assert collector.flush() == 96
        batch = learner.sample(64, min_committed=96)
        assert (batch["step"] == batch.seqs).all()
        with RawLearner(server.endpoints) as raw:
            assert raw.window(1, "step")[1].tolist() == list(range(96))
        assert_conserved(report_of(server))


@pytest.mark.slow
def test_publishes_repeated_meanwhile_are_taken_once(server: ServerProcess) -> None:
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector:
        with frozen(server.child):
            collector.write(marker_steps(0, 1, 0, 32))
            with pytest.raises(ReplayTimeout):
                collector.flush(2.5)
            assert collector.statistics().repeats >= 1
        assert collector.flush() == 32
        assert report_of(server)["counters"]["rows_published"] == 32
