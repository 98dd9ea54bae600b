"""When learning starts, how fresh a batch must be, and the band of samples per insert."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from replay_server_client import Collector, InvalidRequest, Learner, ReplayTimeout, Schema
from replay_server_client.admin import Admin
from replay_server_protocol.messages import Cancel, Grant, Unused
from support.rarely import rarely
from support.raw_client import RawCollector, RawLearner
from support.reports import report_of, wait_report
from support.servers import ServerProcess

from replay_server.status_text import status_lines

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


@pytest.mark.parametrize("prefetch", [1, *rarely(0, 3)])
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
        report = wait_report(server, lambda found: found["flow"]["state"] == "collectors_wait_for_samples")
        assert "learners must sample" in report["flow"]["reason"]
        assert report["flow"]["inserted_rows"] == 16
        learner.ask(1, 16)
        learner.release(learner.receive(Grant))
        collector.wait_credit(3)
        for number in range(2, 6):
            learner.ask(number, 16)
            learner.release(learner.receive(Grant))
        learner.ask(6, 16)
        report = wait_report(server, lambda found: found["flow"]["state"] == "learners_wait_for_inserts")
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


def test_a_batch_dropped_after_its_release_is_refunded_once_and_never_more_than_was_granted(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, SCHEMA) as collector, RawLearner(server.endpoints) as learner:
        collector.publish(1, 0, 8)
        learner.release(learner.grant(1, 5))
        learner.release(learner.grant(2, 7))
        learner.send(Unused, 5)
        report = wait_report(server, lambda found: found["counters"]["batches_dropped"] == 1)
        assert report["flow"]["sampled_rows"] == 7
        assert report["learners"][0]["dropped"] == 1
        learner.send(Unused, 2**40)
        assert wait_report(server, lambda found: found["counters"]["batches_dropped"] == 2)["flow"]["sampled_rows"] == 0
        learner.release(learner.grant(3, 3))
        assert wait_report(server, lambda found: found["learners"][0]["open_leases"] == 0)["flow"]["sampled_rows"] == 3


def test_a_learner_is_not_refunded_what_another_used_nor_what_is_still_leased(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, SCHEMA) as collector, RawLearner(server.endpoints) as user, RawLearner(server.endpoints) as liar:
        collector.publish(1, 0, 8)
        user.release(user.grant(1, 5))
        wait_report(server, lambda found: found["learners"][0]["open_leases"] == 0)
        grant = liar.grant(1, 7)
        liar.send(Unused, 12)
        assert wait_report(server, lambda found: found["counters"]["batches_dropped"] == 1)["flow"]["sampled_rows"] == 12
        liar.release(grant, is_used=False)
        assert wait_report(server, lambda found: found["counters"]["batches_dropped"] == 2)["flow"]["sampled_rows"] == 5


def test_what_was_sampled_before_a_new_ratio_is_not_refunded_after_it(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "16", "--samples-per-insert", "1", "--tolerance", "64")
    with RawCollector(server.endpoints, SCHEMA) as collector, RawLearner(server.endpoints) as learner:
        collector.publish(1, 0, 8)
        learner.release(learner.grant(1, 5))
        open_then = learner.grant(4, 9)
        with Admin.connect(server.name, run_dir=server.run_dir) as admin:
            admin.set("samples-per-insert", "2")
        learner.release(learner.grant(2, 7))
        learner.release(open_then)
        learner.release(learner.grant(3, 8))
        learner.send(Unused, 7)
        learner.send(Unused, 9)
        assert wait_report(server, lambda found: found["counters"]["batches_dropped"] == 2)["flow"]["sampled_rows"] == 0
        learner.send(Unused, 5)
        assert wait_report(server, lambda found: found["counters"]["batches_dropped"] == 3)["flow"]["sampled_rows"] == 0
        assert report_of(server)["flow"]["samples_per_insert_target"] == 2


def test_a_revoked_batch_and_those_of_a_dead_learner_are_refunded(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "16", "--lease", "0.05")
    with RawCollector(server.endpoints, SCHEMA) as collector, RawLearner(server.endpoints) as learner:
        collector.publish(1, 0, 8)
        learner.release(learner.grant(1, 5))
        late = learner.grant(2, 7)
        report = wait_report(server, lambda found: found["counters"]["leases_revoked"] == 1)
        assert report["flow"]["sampled_rows"] == 5
        learner.release(late, is_used=False)
        assert wait_report(server, lambda found: found["counters"]["batches_dropped"] == 1)["flow"]["sampled_rows"] == 5


def test_a_batch_used_in_time_whose_release_comes_after_the_revocation_counts_once(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "8", "--lease", "0.05")
    with RawCollector(server.endpoints, SCHEMA) as collector, RawLearner(server.endpoints) as learner:
        collector.publish(1, 0, 8)
        collector.wait_credit(1)
        used, dropped = learner.grant(1, 8), learner.grant(2, 4)
        report = wait_report(server, lambda found: found["counters"]["leases_revoked"] == 2)
        assert report["flow"]["sampled_rows"] == 0
        for _ in range(2):  # a repeat counts no more
            learner.release(used)
        learner.release(dropped, is_used=False)
        report = wait_report(server, lambda found: found["counters"]["stale_messages"] == 3)
        assert report["flow"]["sampled_rows"] == 8
        (seen,) = report["learners"]
        assert (seen["batches"], seen["rows"], seen["dropped"]) == (1, 8, 1), "granted were two"
        learner.send(Unused, 100)
        wait_report(server, lambda found: found["flow"]["sampled_rows"] == 0)


def test_counters_go_on_when_clients_attach_again_and_repeats_count_once(server: ServerProcess) -> None:
    for life in range(1, 4):
        with RawCollector(server.endpoints, SCHEMA) as collector, RawLearner(server.endpoints) as learner:
            for _ in range(3):
                collector.publish(1, 0, 8)  # as after a lost credit
            collector.wait_credit(1)
            grant = learner.grant(1, 5)
            assert learner.grant(1, 5) == grant  # as after a lost grant
            learner.release(grant)
            report = wait_report(server, lambda found: found["learners"][-1]["open_leases"] == 0)
            assert (report["flow"]["inserted_rows"], report["flow"]["sampled_rows"]) == (8 * life, 5 * life)
            assert report["flow"]["samples_per_insert"] == pytest.approx(5 / 8)
        wait_report(server, lambda found: not found["learners"] and not found["collectors"])


def test_a_lost_connection_changes_no_counter_and_its_open_lease_is_refunded_at_its_deadline(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "16", "--lease", "0.3")
    with RawCollector(server.endpoints, SCHEMA) as collector, RawLearner(server.endpoints) as learner:
        collector.publish(1, 0, 8)
        learner.release(learner.grant(1, 5))
        learner.grant(2, 7)
        learner.connection.detach()  # without a word
        assert report_of(server)["flow"]["sampled_rows"] == 12
        with RawLearner(server.endpoints) as again:
            again.send(Unused, 100)
            again.release(again.grant(1, 3))
            report = wait_report(server, lambda found: found["counters"]["leases_revoked"] == 1)
            assert report["flow"]["sampled_rows"] == 8


def test_bulk_loaded_rows_wait_for_nobody_and_do_not_count(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "8", "--samples-per-insert", "2", "--tolerance", "32")
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, counted=False) as loader:
        loader.write({"mark": np.arange(500)}, timeout=5)
        assert loader.flush(5) == 500
        flow = report_of(server)["flow"]
        assert (flow["inserted_rows"], flow["blocked_side"]) == (0, None)
        with RawCollector(server.endpoints, SCHEMA) as collector, RawLearner(server.endpoints) as learner:
            for number in (1, 2):
                learner.release(learner.grant(number, 16))
            learner.ask(3, 16)
            wait_report(server, lambda found: found["flow"]["state"] == "learners_wait_for_inserts")
            collector.publish(1, 0, 8)
            learner.release(learner.receive(Grant))


def test_nobody_waits_where_nobody_asks_and_the_time_in_each_state_adds_up(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server(
        "--capacity", "1000", "--slot-rows", "8", "--samples-per-insert", "2", "--tolerance", "32", "--learning-starts", "8"
    )
    flow = report_of(server)["flow"]
    assert (flow["state"], flow["blocked_side"], flow["reason"]) == ("waiting_for_schema", None, None)
    with RawCollector(server.endpoints, SCHEMA) as collector, RawLearner(server.endpoints) as learner:
        flow = report_of(server)["flow"]
        assert (flow["state"], flow["blocked_side"], flow["reason"]) == ("free", None, None)
        learner.ask(1, 16)
        report = wait_report(server, lambda found: found["flow"]["state"] == "learners_wait_for_start" and found["flow"]["since_s"] > 0.05)
        assert report["flow"]["blocked_side"] == "learners"
        for number in range(1, 4):
            collector.publish(number, (number - 1) % 2, 8)
            collector.wait_credit(number)
        learner.release(learner.receive(Grant))
        assert report_of(server)["flow"]["state"] == "free"
        learner.ask(2, 16, min_committed=1000)
        report = wait_report(server, lambda found: found["flow"]["state"] == "learners_wait_for_seq" and found["flow"]["since_s"] > 0.05)
        assert "seq 1,000" in report["flow"]["reason"]
        for number in (4, 5):
            collector.publish(number, (number - 1) % 2, 8)
        report = wait_report(server, lambda found: found["flow"]["state"] == "both_wait")
        assert report["flow"]["blocked_side"] == "both"
        assert "learners must sample" in report["flow"]["reason"]
        assert "seq 1,000" in report["flow"]["reason"]
        learner.send(Cancel, 0, 2)
        report = wait_report(server, lambda found: found["flow"]["state"] == "collectors_wait_for_samples")
    seconds = report["flow"]["time_in_state_s"]
    assert seconds["learners_wait_for_start"] > 0.05
    assert seconds["learners_wait_for_seq"] > 0.05
    assert sum(seconds.values()) == pytest.approx(report["uptime_s"], abs=0.1)
    assert report["flow"]["time_in_state_last_minute_s"] == pytest.approx(seconds, abs=0.1)
    (line,) = (line for line in status_lines(report) if line.startswith("flow"))
    assert re.match(r"flow +collectors_wait_for_samples for [0-9.]+ m?s: ", line)
    assert "last minute " in line
    assert "learners_wait_for_seq" in line
    wait_report(server, lambda found: not found["learners"] and not found["collectors"])
