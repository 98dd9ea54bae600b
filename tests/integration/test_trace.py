"""Traces of a server, a collector and a learner, merged: one story on one clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_server_client import Collector, Learner, ReplayTimeout, Trace
from replay_server_protocol.trace import Event, load, merge
from support.markers import MARKERS, marker_steps
from support.processes import ChildFailed, Children
from support.raw_client import RawLearner
from support.servers import ServerProcess, spawn_server

LANES, SLOTS = 4, 6
"""Each write fills a slot of 16 rows."""


def spans(events: list[Event], name: str) -> list[Event]:
    return sorted((event for event in events if event["ph"] == "X" and event["name"] == name), key=lambda event: event["ts"])


def end_us(event: Event) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def is_within(inner: Event, outer: Event) -> bool:
    return outer["ts"] <= inner["ts"] and end_us(inner) <= end_us(outer)


def run_clients(server: ServerProcess, collects: Trace | None, learns: Trace | None) -> None:
    with (
        Collector.connect(server.name, schema=MARKERS, lanes=LANES, run_dir=server.run_dir, name="walker", trace=collects) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=0, trace=learns) as learner,
    ):
        for slot in range(SLOTS):
            collector.write(marker_steps(0, LANES, 4 * slot, 4))
            learner.sample(8, min_committed=16 * (slot + 1))


def test_the_merged_trace_tells_each_slot_and_batch_in_order(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = start_server("--capacity", "64", "--slot-rows", "16", "--trace", str(tmp_path / "server.json"))
    collects, learns = Trace("collector"), Trace("learner")
    run_clients(server, collects, learns)
    assert server.stop() == 0
    collects.save(tmp_path / "collector.json")
    learns.save(tmp_path / "learner.json")
    merge((tmp_path / name for name in ("learner.json", "collector.json", "server.json")), tmp_path / "all.json")
    events = load(tmp_path / "all.json")
    told = {name: spans(events, name) for name in ("write", "publish", "drain", "copy", "commit", "boundary", "request", "gather", "grant")}
    assert {name: len(found) for name, found in told.items()} == dict.fromkeys(told, SLOTS)
    assert [copy["args"]["first_seq"] for copy in told["copy"]] == [16 * slot for slot in range(SLOTS)]
    assert {copy["args"]["collector"] for copy in told["copy"]} == {"walker"}
    assert [commit["args"]["committed"] for commit in told["commit"]] == [16 * slot for slot in range(1, SLOTS + 1)]
    for slot in range(SLOTS):
        write, publish, drain, copy, commit, boundary, request, gather, grant = (told[name][slot] for name in told)
        assert is_within(publish, write)
        assert is_within(request, boundary)
        assert is_within(gather, boundary)
        assert publish["ts"] <= drain["ts"] <= copy["ts"] <= end_us(drain), "the copy is submitted by the drain"
        assert commit["ts"] <= end_us(copy) <= end_us(commit), "what the loop saw complete, it commits"
        assert request["ts"] <= grant["ts"]
        assert end_us(commit) <= grant["ts"] + 1e-3, "rows committed before they were granted"
        assert end_us(request) <= gather["ts"] + 1e-3
        assert gather["args"]["committed"] == 16 * (slot + 1)
    assert len({event["pid"] for event in events}) == 3


def test_waiting_for_credit_is_told_within_the_write_that_waits(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = start_server("--capacity", "64", "--slot-rows", "16", "--depth", "1", "--debug-copy-delay", "0.3")
    trace = Trace("collector")
    with Collector.connect(server.name, schema=MARKERS, lanes=LANES, run_dir=server.run_dir, trace=trace) as collector:
        collector.write(marker_steps(0, LANES, 0, 8))
        with pytest.raises(ReplayTimeout):
            collector.write(marker_steps(0, LANES, 8, 4), timeout=0)
    trace.save(tmp_path / "trace.json")
    events = load(tmp_path / "trace.json")
    (write,) = spans(events, "write")  # the one that timed out wrote nothing
    wait, *_ = spans(events, "wait for credit")
    assert is_within(wait, write)
    assert wait["dur"] > 100_000, "the second slot had to wait for the first one's copy"


def test_the_next_batch_is_asked_for_when_the_update_has_begun_and_ready_when_it_ends(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "64", "--slot-rows", "16")
    trace = Trace("learner")
    with (
        Collector.connect(server.name, schema=MARKERS, lanes=LANES, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", trace=trace) as learner,
    ):
        collector.write(marker_steps(0, LANES, 0, 4))
        for _ in range(26):
            learner.sample(8)
            time.sleep(0.06)  # the update
    spans_of = {
        name: sorted((begin, end) for begin, end, _, told, _ in trace.since(0)[0] if told == name) for name in ("boundary", "request")
    }
    lent = [end for _, end in spans_of["boundary"]]
    later_ms = [(min(begin for begin, _ in spans_of["request"] if begin >= end) - end) / 1e6 for end in lent[10:-2]]
    assert 3 <= statistics.median(later_ms) <= 20, "5 ms, and what a busy machine adds"
    assert statistics.median(end - begin for begin, end in spans_of["boundary"][10:]) < 1e6, "it was ready when it was wanted"


def test_a_revoked_lease_is_told(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = start_server("--capacity", "64", "--slot-rows", "16", "--lease", "0.01", "--trace", str(tmp_path / "server.json"))
    with Collector.connect(server.name, schema=MARKERS, lanes=LANES, run_dir=server.run_dir) as collector:
        collector.write(marker_steps(0, LANES, 0, 4))
        seq = collector.flush()
        with RawLearner(server.endpoints) as learner:
            learner.grant(1, min_committed=seq)
            server.child.wait_for("revoked lease")
    assert server.stop() == 0
    (revoke,) = spans(load(tmp_path / "server.json"), "revoke")
    assert revoke["args"] == {"leases": 1}


def test_without_the_option_no_file_is_written(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = start_server("--capacity", "64", "--slot-rows", "16")
    run_clients(server, None, None)
    assert server.stop() == 0
    assert list(tmp_path.iterdir()) == []
    assert "spans" not in server.child.output


def test_a_path_that_can_not_be_written_is_refused_before_the_server_serves(run_dir: Path, children: Children) -> None:
    with pytest.raises(ChildFailed, match="name a file in a folder"):
        spawn_server(children, run_dir, "--trace", str(run_dir / "missing" / "trace.json"))


def test_a_trace_that_can_not_be_written_at_the_end_is_logged_and_the_server_ends_well(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    folder = tmp_path / "goes"
    folder.mkdir()
    server = start_server("--capacity", "64", "--slot-rows", "16", "--trace", str(folder / "trace.json"))
    folder.rmdir()
    run_clients(server, None, None)
    assert server.stop() == 0
    assert "can't be written" in server.child.output
