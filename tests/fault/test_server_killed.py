"""The server dies by kill -9 and another one of its name takes its place: clients go on, and nothing of the old life counts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from replay_server_client import Collector, Learner, ServerGone
from replay_server_protocol.messages import Credit, Publish
from replay_server_protocol.segment import segment_dir
from support.freeze import frozen
from support.markers import MARKERS, is_whole, marker_steps
from support.processes import Children
from support.raw_client import RawCollector, RawLearner
from support.reports import assert_conserved, report_of, wait_report
from support.servers import ServerProcess, spawn_server

OPTIONS = ("--capacity", "100", "--slot-rows", "16")


def segments() -> set[str]:
    return {name for name in os.listdir(segment_dir()) if name.startswith("replay-")}


def restart(children: Children, server: ServerProcess, *options: str) -> ServerProcess:
    server.kill()
    return spawn_server(children, server.run_dir, *(options or OPTIONS), name=server.name)


def test_collectors_and_learner_go_on_without_a_restart_of_their_own(children: Children, crash_dir: Path) -> None:
    server = spawn_server(children, crash_dir, *OPTIONS)
    before = report_of(server)["generation"]
    with (
        Collector.connect(server.name, schema=MARKERS, run_dir=crash_dir, name="c0") as first,
        Collector.connect(server.name, schema=MARKERS, lanes=2, run_dir=crash_dir, name="c1") as second,
        Learner.connect(server.name, device="cpu", run_dir=crash_dir) as learner,
    ):
        first.write(marker_steps(0, 1, 0, 50))
        second.write(marker_steps(1, 2, 0, 50))
        seq = max(first.flush(), second.flush())
        assert seq == 150
        learner.sample(32, min_committed=seq)
        server = restart(children, server)
        again = time.monotonic()
        for step in (50, 60):
            first.write(marker_steps(0, 1, step, 10))
            second.write(marker_steps(1, 2, step, 10))
        seq = max(first.flush(), second.flush())
        assert seq == 60
        for _ in range(4):
            batch = learner.sample(32, min_committed=seq)
            assert is_whole(batch.fields).all()
            assert int(batch["step"].min()) >= 50, "rows of the old ring are gone"
            assert batch.window == (0, 60)
        assert time.monotonic() - again < 5
        report = report_of(server)
        assert report["generation"] > before
        assert sorted(c["name"] for c in report["collectors"]) == ["c0", "c1"]
        assert learner.statistics().generations == 2
        assert_conserved(report)
    assert server.stop() == 0
    assert list(crash_dir.iterdir()) == []


def test_a_learner_that_shall_not_attach_again_raises_at_once_and_stays_lost(children: Children, crash_dir: Path) -> None:
    server = spawn_server(children, crash_dir, *OPTIONS)
    with (
        Collector.connect(server.name, schema=MARKERS, run_dir=crash_dir) as collector,
        Learner.connect(server.name, device="cpu", run_dir=crash_dir, reattach=False) as learner,
    ):
        collector.write(marker_steps(0, 1, 0, 50))
        collector.flush()
        learner.sample(8)
        assert learner.generation == report_of(server)["generation"]
        server = restart(children, server)
        assert learner.generation is None
        for _ in range(3):
            begun = time.monotonic()
            with pytest.raises(ServerGone):
                while True:
                    learner.sample(8)
            assert time.monotonic() - begun < 1
    assert server.stop() == 0


def test_rows_in_flight_are_counted_as_lost_by_client_and_server(children: Children, crash_dir: Path) -> None:
    slow = ("--capacity", "100", "--slot-rows", "16", "--debug-copy-delay", "30")
    server = spawn_server(children, crash_dir, *slow)
    with Collector.connect(server.name, schema=MARKERS, run_dir=crash_dir) as collector:
        collector.write(marker_steps(0, 1, 0, 27))
        server = restart(children, server)
        with pytest.raises(ServerGone, match="27 rows") as gone:
            collector.flush()
        assert gone.value.details["rows_lost"] == 27
        collector.write(marker_steps(0, 1, 27, 5))
        assert collector.flush() == 5
        found = collector.statistics()
        assert (found.rows_written, found.rows_committed, found.rows_lost) == (32, 5, 27)
        report = report_of(server)
        assert (report["counters"]["rows_lost"], report["counters"]["rows_published"]) == (27, 32)
        assert_conserved(report)
    assert server.stop() == 0


def test_messages_of_the_old_life_are_refused_and_counted(children: Children, crash_dir: Path) -> None:
    server = spawn_server(children, crash_dir, *OPTIONS)
    with RawCollector(server.endpoints, MARKERS) as collector, RawCollector(server.endpoints, MARKERS, name="other") as other:
        collector.publish(1, 0, 16)
        collector.wait_credit(1)
        old = Publish(collector.connection.session, collector.connection.generation, 2, 1, 16, 0, 0, 0, b"", [])
        server = restart(children, server)
        collector.connection.send(old)  # its socket finds the new server by itself
        assert wait_report(server, lambda found: found["counters"]["stale_messages"] == 1)["counters"]["rows_published"] == 0
        with pytest.raises(ServerGone):
            collector.receive(Credit)
        with pytest.raises(ServerGone):
            other.receive(Credit)
        with RawCollector(server.endpoints, MARKERS) as fresh:
            assert fresh.connection.generation > old.generation
            spoof = Publish(fresh.connection.session, old.generation, 1, 0, 16, 0, 0, 0, b"", [])
            fresh.connection.send(spoof)
            wait_report(server, lambda found: found["counters"]["stale_messages"] == 2)
        assert report_of(server)["counters"]["rows_published"] == 0
    assert server.stop() == 0


def test_segments_of_the_dead_are_swept_and_mappings_stay_readable(children: Children, crash_dir: Path) -> None:
    before = segments()
    server = spawn_server(children, crash_dir, *OPTIONS)
    with (
        RawCollector(server.endpoints, MARKERS) as collector,
        RawLearner(server.endpoints) as learner,
        Learner.connect(server.name, device="cpu", run_dir=crash_dir) as poster,
    ):
        poster.post("policy", {"w": np.zeros(1000)})
        collector.fill(0, "step", np.arange(16))
        collector.publish(1, 0, 16)
        collector.wait_credit(1)
        assert len(segments() - before) == 2, "the ring and the newest version; the slots' name is gone already"
        server = restart(children, server)
        assert segments() - before == set()
        server.child.wait_for("swept")
        assert learner.read("step", 0, 16).tolist() == list(range(16))
    assert server.stop() == 0
    assert list(crash_dir.iterdir()) == []


def test_rows_lost_are_counted_once_though_the_first_attach_was_not_answered_in_time(children: Children, crash_dir: Path) -> None:
    options = ("--capacity", "100", "--slot-rows", "16")
    server = spawn_server(children, crash_dir, *options, "--debug-copy-delay", "30")
    with Collector.connect(server.name, schema=MARKERS, run_dir=crash_dir) as collector:
        collector.write(marker_steps(0, 1, 0, 16))
        server.kill()
        server = spawn_server(children, crash_dir, *options, name=server.name)
        with frozen(server.child), pytest.raises(ServerGone, match="its process is stopped"):
            collector.write(marker_steps(0, 1, 16, 1), timeout=0.3)  # its HELLO is read once the server goes on
        collector.write(marker_steps(0, 1, 16, 1))
        with pytest.raises(ServerGone, match="16 rows"):
            collector.flush()
        collector.flush()
        told = report_of(server)["counters"]
        assert (told["rows_lost"], told["rows_published"], told["rows_committed"]) == (16, 17, 1)
        assert_conserved(report_of(server))
    server.stop()


def test_rows_that_a_living_server_commits_after_their_session_are_not_told_to_it_as_lost(children: Children, crash_dir: Path) -> None:
    server = spawn_server(children, crash_dir, "--capacity", "100", "--slot-rows", "16", "--debug-copy-delay", "0.3")
    with Collector.connect(server.name, schema=MARKERS, run_dir=crash_dir) as collector:
        collector.write(marker_steps(0, 1, 0, 16))
        collector._ingress.lose()  # as when the server ended the session of a client that was stopped for long
        collector.write(marker_steps(0, 1, 16, 4))
        with pytest.raises(ServerGone, match="16 rows"):
            collector.flush()
        assert collector.flush() == 20
        told = report_of(server)["counters"]
        assert (told["rows_lost"], told["rows_published"], told["rows_committed"]) == (0, 20, 20)
        assert_conserved(report_of(server))
    server.stop()
