"""When learning starts, how fresh a batch must be, and the band of samples per insert."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from replay_server_client import Collector, InvalidRequest, Learner, ReplayTimeout, Schema
from replay_server_protocol.messages import Grant
from support.raw_client import RawCollector, RawLearner
from support.reports import report_of, wait_report
from support.servers import ServerProcess

SCHEMA = Schema.of(mark="int64")


def test_learning_starts_with_its_row_and_not_before(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "100", "--slot-rows", "16", "--learning-starts", "50")
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu") as learner,
    ):
        collector.write({"mark": np.arange(49)})
        collector.flush()
        with pytest.raises(ReplayTimeout, match=r"50.*49"):
            learner.wait_ready(timeout=0.2)
        collector.write({"mark": np.arange(1)})
        collector.flush()
        learner.wait_ready(timeout=5)
        assert learner.sample(4).window == (0, 50)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_min_committed_is_never_met_by_an_older_batch(server: ServerProcess, prefetch: int) -> None:
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=prefetch) as learner,
    ):
        for step in range(60):
            collector.write({"mark": np.arange(7 * step, 7 * step + 7)})
            seq = collector.flush()
            assert seq == 7 * step + 7
            batch = learner.sample(16, min_committed=seq)
            assert batch.window == (0, seq)
            assert (batch["mark"] == batch.seqs).all()


def test_the_band_of_samples_per_insert_holds_both_sides(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "8", "--samples-per-insert", "2", "--tolerance", "32")
    with RawCollector(server.endpoints, SCHEMA) as collector, RawLearner(server.endpoints) as learner:
        for number in (1, 2):
            collector.publish(number, number - 1, 8)
        collector.wait_credit(2)
        collector.publish(3, 0, 8)
        report = wait_report(server, lambda found: found["flow"]["state"] == "collectors_wait")
        assert "learners must sample" in report["flow"]["reason"]
        assert report["flow"]["inserted_rows"] == 16
        learner.ask(1, 16)
        learner.release(learner.receive(Grant))
        collector.wait_credit(3)
        for number in range(2, 6):
            learner.ask(number, 16)
            learner.release(learner.receive(Grant))
        learner.ask(6, 16)
        report = wait_report(server, lambda found: found["flow"]["state"] == "learners_wait")
        assert report["flow"]["sampled_rows"] == 80
        assert report["flow"]["samples_per_insert"] == pytest.approx(80 / 24)
        collector.publish(4, 1, 8)
        learner.release(learner.receive(Grant))


def test_a_batch_that_could_dead_end_fails_at_once_with_the_numbers(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "8", "--samples-per-insert", "2", "--tolerance", "32")
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu") as learner,
    ):
        collector.write({"mark": np.arange(8)})
        collector.flush()
        with pytest.raises(InvalidRequest, match=r"49.*64.*65"):
            learner.sample(49, timeout=60)
        assert len(learner.sample(16)) == 16


def test_a_dropped_batch_does_not_count_as_sampled(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, SCHEMA) as collector, RawLearner(server.endpoints) as learner:
        collector.publish(1, 0, 8)
        learner.release(learner.grant(1, 5), is_used=False)
        learner.release(learner.grant(2, 7))
        assert wait_report(server, lambda found: found["learners"][0]["open_leases"] == 0)["flow"]["sampled_rows"] == 7
        assert report_of(server)["counters"]["batches_dropped"] == 1
