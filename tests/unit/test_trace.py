"""A trace: what is kept, what the file says, and what happens when it can't be written."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_server_protocol import trace as module
from replay_server_protocol.errors import InvalidRequest, ReplayError
from replay_server_protocol.trace import CALLING_THREAD, Event, Trace, check_writable, load, merge


def spans(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def names(events: list[Event], kind: str) -> dict[tuple[int, int], str]:
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == kind}


def saved(trace: Trace, path: Path) -> list[Event]:
    trace.save(path)
    return load(path)


def test_a_file_holds_absolute_microseconds_and_the_names_of_process_and_tracks(tmp_path: Path) -> None:
    trace = Trace("learner")
    trace.record("gathers", "gather", 5_000_000_000_123, 5_000_000_010_456, number=7, of="uniform")
    events = saved(trace, tmp_path / "trace.json")
    (gather,) = spans(events)
    assert (gather["name"], gather["pid"], gather["args"]) == ("gather", os.getpid(), {"number": 7, "of": "uniform"})
    assert (round(gather["ts"] * 1000), round(gather["dur"] * 1000)) == (5_000_000_000_123, 10_333)
    assert names(events, "process_name") == {(os.getpid(), 0): f"learner (pid {os.getpid()})"}
    assert names(events, "thread_name") == {(os.getpid(), gather["tid"]): "gathers"}


def test_a_block_is_a_span_on_the_monotonic_clock_also_when_it_raises(tmp_path: Path) -> None:
    trace = Trace("learner")
    before_ns = time.monotonic_ns()
    with pytest.raises(KeyError), trace.span("update", tick=3):
        raise KeyError
    after_ns = time.monotonic_ns()
    events = saved(trace, tmp_path / "trace.json")
    (update,) = spans(events)
    assert (update["name"], update["args"]) == ("update", {"tick": 3})
    assert before_ns <= update["ts"] * 1000 + 1
    assert (update["ts"] + update["dur"]) * 1000 <= after_ns + 1
    assert list(names(events, "thread_name").values()) == [CALLING_THREAD]


def test_a_full_trace_keeps_the_newest_spans_and_says_how_many_it_dropped(tmp_path: Path) -> None:
    trace = Trace("server", max_spans=3)
    for number in range(10):
        trace.record("loop", "drain", number * 1000, number * 1000 + 1, number=number)
    assert (trace.size, trace.dropped) == (3, 7)
    assert [span["args"]["number"] for span in spans(saved(trace, tmp_path / "trace.json"))] == [7, 8, 9]
    described = json.loads((tmp_path / "trace.json").read_text())["otherData"]["processes"]
    assert described == [{"process": "server", "pid": os.getpid(), "spans": 3, "dropped_spans": 7}]


def test_a_trace_of_no_spans_is_refused_and_an_empty_one_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="max_spans"):
        Trace("x", max_spans=0)
    assert spans(saved(Trace("x"), tmp_path / "trace.json")) == []


def test_spans_that_overlap_come_on_lines_of_their_own(tmp_path: Path) -> None:
    trace = Trace("server")
    for begin_us, end_us in ((0, 10), (5, 15), (16, 20), (1, 4)):
        trace.record("copies", "copy", begin_us * 1000, end_us * 1000)
    events = saved(trace, tmp_path / "trace.json")
    line_of = names(events, "thread_name")
    lines = {event["ts"]: line_of[event["pid"], event["tid"]] for event in spans(events)}
    assert lines == {0: "copies", 1: "copies", 5: "copies 2", 16: "copies"}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_on_every_line_spans_nest_or_follow_one_another(times: list[tuple[int, int]]) -> None:
    made: list[tuple[int, int, str, str, dict[str, int | float | str]]] = [(begin, begin + length, "t", "s", {}) for begin, length in times]
    lines = module._nesting(made)
    assert sorted(span[:2] for line in lines for span in line) == sorted(span[:2] for span in made)
    for line in lines:
        for at, one in enumerate(line):
            for other in line[at + 1 :]:
                assert other[0] >= one[1] or other[1] <= one[1], f"{one} and {other} cross"


def test_threads_that_record_at_once_lose_nothing() -> None:
    trace = Trace("x", max_spans=100)

    def record() -> None:
        for _ in range(500):
            trace.record("t", "s", 0, 1)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (trace.size, trace.dropped) == (100, 1900)


def test_merged_files_hold_every_span_and_every_process(tmp_path: Path) -> None:
    paths = []
    for process, begin_ns in (("server", 1000), ("collector", 2000), ("learner", 3000)):
        trace = Trace(process)
        trace.record("t", process, begin_ns, begin_ns + 1)
        paths.append(tmp_path / f"{process}.json")
        trace.save(paths[-1])
    merge(paths, tmp_path / "all.json")
    events = load(tmp_path / "all.json")
    assert [(event["name"], event["ts"]) for event in spans(events)] == [("server", 1), ("collector", 2), ("learner", 3)]
    assert len({event["pid"] for event in spans(events)}) == 3, "three traces of one pid stay apart"
    described = json.loads((tmp_path / "all.json").read_text())["otherData"]["processes"]
    assert [process["process"] for process in described] == ["server", "collector", "learner"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"traceEvents": [{}], "otherData": {"processes": []}}'])
def test_a_file_that_is_no_trace_is_refused_by_name_and_nothing_is_written(tmp_path: Path, content: str) -> None:
    (tmp_path / "odd.json").write_text(content)
    with pytest.raises(InvalidRequest, match=r"odd\.json"):
        merge([tmp_path / "odd.json"], tmp_path / "all.json")
    assert [path.name for path in tmp_path.iterdir()] == ["odd.json"]


@pytest.mark.parametrize("place", ["missing/trace.json", "."])
def test_a_path_that_can_not_be_written_is_known_before_the_work_begins(tmp_path: Path, place: str) -> None:
    with pytest.raises(InvalidRequest, match="name a file"):
        check_writable(tmp_path / place)


def test_asking_whether_a_path_can_be_written_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("earlier")
    check_writable(tmp_path / "trace.json")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"trace.json": "earlier"}


def test_a_full_disk_is_a_typed_error_and_an_earlier_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace.json").write_text("earlier")

    def full(content: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "_json", full)
    with pytest.raises(ReplayError, match="No space left"):
        Trace("x").save(tmp_path / "trace.json")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"trace.json": "earlier"}
