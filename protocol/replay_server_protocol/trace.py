"""What a process did and when: spans of time in bounded memory, saved as a Chrome trace that https://ui.perfetto.dev opens.

```
process   track            spans
server    loop             drain, commit, grant, revoke
          copies           copy: submission to completion seen
collector calling thread   write, and within it: wait for credit, publish
learner   calling thread   boundary (the call of sample), update (the user's own: ``with trace.span("update")``)
          requests         request: asked to granted
          gathers          gather: submission to completion seen
```

Times are CLOCK_MONOTONIC, which all processes of a host share, and are written absolute: traces of several processes merge by
concatenation. Whoever may be traced holds a ``Trace | None`` and tests it for None; that test is all that a trace which is off costs.
A span of a trace is a length of time; that of a ring is rows.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from replay_server_protocol.errors import DiskFull, InvalidRequest, ReplayError, shown

MAX_SPANS = 200_000
"""About 80 MB when full."""
CALLING_THREAD = "calling thread"
"""The track of calls that the user's own thread is in: write, boundary, update."""

Arg = int | float | str
Event = dict[str, Any]
Span = tuple[int, int, str, str, dict[str, Arg]]
"""Begin and end in nanoseconds, track, name, arguments."""


class Trace:
    """The newest ``max_spans`` spans of one process. Any thread may record; nothing is written before ``save``."""

    def __init__(self, process: str, *, max_spans: int = MAX_SPANS) -> None:
        """``process`` is the name that the viewer shows. Raises InvalidRequest for a limit below one span."""
        if not isinstance(max_spans, int) or not 1 <= max_spans < 2**31:
            raise InvalidRequest(f"max_spans={shown(max_spans)}: a number of spans, at least 1")
        self.process = process
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._recorded = 0
        self._lock = threading.Lock()  # two threads may record at once; the count would lose one of them

    now_ns = staticmethod(time.monotonic_ns)
    """The clock of every span."""

    @property
    def size(self) -> int:
        return len(self._spans)

    @property
    def dropped(self) -> int:
        """Spans that newer ones have pushed out."""
        return self._recorded - len(self._spans)

    def record(self, track: str, name: str, begin_ns: int, end_ns: int, /, **args: Arg) -> None:
        """Keeps one span that is over. About a microsecond; never waits for more than another thread's record."""
        with self._lock:
            self._recorded += 1
            self._spans.append((begin_ns, end_ns, track, name, args))

    @contextlib.contextmanager
    def span(self, name: str, track: str = CALLING_THREAD, /, **args: Arg) -> Iterator[None]:
        """Records the block as a span, also when it raises."""
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.record(track, name, begin_ns, time.monotonic_ns(), **args)

    def since(self, begin_ns: int) -> tuple[list[Span], int]:
        """The spans that ended at ``begin_ns`` or later, and how many spans in all were pushed out."""
        with self._lock:
            return [span for span in self._spans if span[1] >= begin_ns], self.dropped

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, whole or not at all. Raises as ``check_writable`` does, DiskFull, or ReplayError where it can't be written; then
        an earlier file of that name is as it was."""
        spans, dropped = self.since(0)
        pid = os.getpid()
        _write(path, events_of(self.process, pid, spans), [described(self.process, pid, len(spans), dropped)])


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises InvalidRequest, naming the path, if no file can be written there; leaves nothing behind. For before the work begins."""
    beside = _open_beside(path)
    os.close(beside[0])
    os.unlink(beside[1])


def merge(paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Writes the traces of several processes into one file. Raises InvalidRequest naming a file that is none, and as ``save`` does."""
    save_together((_read(path) for path in paths), out)


def save_together(traces: Iterable[tuple[list[Event], list[Event]]], out: str | os.PathLike[str]) -> None:
    """Writes several traces, each its events and the descriptions of its processes, into one file. Raises as ``save`` does.

    Two traces of one pid (a pid used again, or two traces in one process) stay apart: the later one is shown under another number.
    """
    merged: list[Event] = []
    processes: list[Event] = []
    for events, recorded in traces:
        renumbered: dict[int, int] = {}
        taken = {event["pid"] for event in merged}
        for pid in sorted({event["pid"] for event in events}):
            renumbered[pid] = pid if pid not in taken else max(taken) + 1
            taken.add(renumbered[pid])
        merged += [event | {"pid": renumbered[event["pid"]]} for event in events]
        processes += recorded
    _write(out, merged, processes)


def load(path: str | os.PathLike[str]) -> list[Event]:
    """The events of a saved or merged file. Raises InvalidRequest naming the file if it is none."""
    return _read(path)[0]


def described(process: str, pid: int, spans: int, dropped: int) -> Event:
    """What a file says of one process that it has spans of."""
    return {"process": process, "pid": pid, "spans": spans, "dropped_spans": dropped}


def not_written(path: str | os.PathLike[str], error: OSError) -> ReplayError:
    """The error for a trace that can't be written: DiskFull where space is what is missing."""
    kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else ReplayError
    return kind(f"trace {os.fspath(path)!r} was not written: {error.strerror}; free space there or name another place")


def events_of(process: str, pid: int, spans: list[Span]) -> list[Event]:
    """Complete events ("ph": "X", microseconds) and the names of process and tracks, which the viewer takes for threads."""
    named: list[Event] = [_name("process_name", pid, 0, f"{process} (pid {pid})")]
    timed: list[Event] = []
    tid = 0
    for track in sorted(dict.fromkeys(span[2] for span in spans), key=lambda track: track != CALLING_THREAD):
        for number, line in enumerate(_nesting(span for span in spans if span[2] == track)):
            tid += 1
            named.append(_name("thread_name", pid, tid, track if number == 0 else f"{track} {number + 1}"))
            named.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
            timed += [_complete(span, pid, tid) for span in line]
    return named + timed


def _nesting(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans of a track on lines, by first fit: on each line they nest or follow one another, since a viewer shows no others."""
    lines: list[list[Span]] = []
    open_ends: list[list[int]] = []  # of each line, the ends of the spans that the next one may lie in
    for span in sorted(spans, key=lambda span: (span[0], -span[1])):
        for line, ends in zip(lines, open_ends, strict=True):
            while ends and ends[-1] <= span[0]:
                ends.pop()
            if not ends or span[1] <= ends[-1]:
                line.append(span)
                ends.append(span[1])
                break
        else:
            lines.append([span])
            open_ends.append([span[1]])
    return lines


def _complete(span: Span, pid: int, tid: int) -> Event:
    begin_ns, end_ns, _, name, args = span
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000, "args": args}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _read(path: str | os.PathLike[str]) -> tuple[list[Event], list[Event]]:
    try:
        content = json.loads(Path(path).read_text("utf-8"))
        events, processes = content["traceEvents"], content["otherData"]["processes"]
        if not all(isinstance(event["pid"], int) for event in events) or not isinstance(processes, list):
            raise TypeError("its events have no pid")
    except (OSError, ValueError, TypeError, KeyError) as error:
        named = os.fspath(path)
        raise InvalidRequest(f"trace {named!r} can't be read: {error!r}; name files that Trace.save or `serve --trace` wrote") from error
    return events, processes


def _write(path: str | os.PathLike[str], events: list[Event], processes: list[Event]) -> None:
    """One event a line, into a file beside ``path`` that takes its name when it is whole."""
    fd, beside = _open_beside(path)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ns","otherData":' + _json({"processes": processes}) + ',"traceEvents":[\n')
            file.write(",\n".join(map(_json, events)))
            file.write("\n]}\n")
        os.replace(beside, path)
    except BaseException as error:
        os.unlink(beside)
        if isinstance(error, OSError):
            raise not_written(path, error) from error
        raise


def _open_beside(path: str | os.PathLike[str]) -> tuple[int, str]:
    if not isinstance(path, str | os.PathLike):
        raise InvalidRequest(f"trace {shown(path)}: name a file")
    target = Path(path)
    if target.exists() and not target.is_file():  # what takes its name would stand in a device's or a folder's place
        raise InvalidRequest(f"trace {os.fspath(path)!r}: a folder or a device; name a file")
    try:
        return tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    except OSError as error:
        named = os.fspath(path)
        raise InvalidRequest(f"trace {named!r} can't be written: {error.strerror}; name a file in a folder that is yours") from error


def _json(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))
