"""How one process hands in what it recorded while a trace was on: a file in the run directory, written by it and read by the operator.

The first line describes the process, each line after it is a list of spans. Written a piece at a time, so that a loop with other work can
write one between its turns; a file that is not whole has no last line ``[]`` and is taken for none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.trace import Event, Trace, described, events_of, not_written

_SPANS_A_PIECE = 2000
"""About 4 ms."""


class PartWriter:
    """Writes what ``trace`` holds since ``since_ns`` to ``path``, which must not exist. ``spans`` and ``dropped`` are counts."""

    def __init__(self, path: Path, trace: Trace, since_ns: int) -> None:
        self._path = path
        self._process = trace.process
        self._spans, self.dropped = trace.since(since_ns)
        self.spans = len(self._spans)
        self._written = 0

    def write_piece(self) -> bool:
        """Writes a few milliseconds' worth; True when the file is whole. Raises DiskFull or ReplayError, and leaves no file then."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if self._written else os.O_CREAT | os.O_EXCL)
        piece = self._spans[self._written : self._written + _SPANS_A_PIECE]
        is_last = self._written + len(piece) >= self.spans
        lines = [] if self._written else [_line(described(self._process, os.getpid(), self.spans, self.dropped))]
        lines += [_line(piece)] if piece else []
        lines += ["[]\n"] if is_last else []
        try:
            with open(os.open(self._path, flags, 0o600), "w", encoding="utf-8") as file:
                file.write("".join(lines))
        except OSError as error:
            self._path.unlink(missing_ok=True)
            raise not_written(self._path, error) from error
        self._written += len(piece)
        return is_last

    def write(self) -> None:
        """The whole file at once: about 1.5 µs a span."""
        while not self.write_piece():
            pass


def read_part(path: Path) -> tuple[list[Event], list[Event]]:
    """Events and description of one process, for ``save_together``. Raises InvalidRequest for a file that is none, or not whole."""
    try:
        first, *pieces = path.read_text("utf-8").splitlines()
        process = json.loads(first)
        lists = [json.loads(piece) for piece in pieces]
        if not lists or lists[-1]:
            raise ValueError("it is not whole")
        spans = [(int(begin), int(end), str(track), str(name), dict(args)) for piece in lists for begin, end, track, name, args in piece]
        description = described(str(process["process"]), int(process["pid"]), len(spans), int(process["dropped_spans"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"part {str(path)!r} of a trace can't be read: {error!r}") from error
    return events_of(description["process"], description["pid"], spans), [description]


def _line(content: object) -> str:
    return json.dumps(content, separators=(",", ":")) + "\n"
