"""What a client records while the operator has a trace on, and how it hands that in."""

from __future__ import annotations

import os
from pathlib import Path

from replay_server_protocol.errors import ReplayError
from replay_server_protocol.messages import MAX_TEXT, Traced, TraceOff, TraceOn
from replay_server_protocol.trace import MAX_SPANS, Trace
from replay_server_protocol.trace_part import PartWriter


class LiveTrace:
    """``trace`` is where to record now, or None: the user's ``own``, if there is one, else one made while the operator wants it.

    Knows no threads: it is asked by whoever reads the client's messages. A client that makes no call hands nothing in.
    """

    def __init__(self, own: Trace | None, process: str, run_dir: Path) -> None:
        self.trace = own
        self._own = own
        self._process = process
        self._run_dir = run_dir
        self._on: TraceOn | None = None
        self._since_ns = 0

    def take(self, message: TraceOn | TraceOff) -> Traced | None:
        """Begins or ends; at the end the answer, after its part was written (100,000 spans: 0.15 s)."""
        if isinstance(message, TraceOff):
            return self.hand_in() if self._on is not None and self._on.number == message.number else None
        if self._on is None or self._on.number != message.number:
            self._on, self._since_ns = message, Trace.now_ns()
            self.trace = self._own or Trace(self._process, max_spans=min(message.max_spans, MAX_SPANS))
        return None

    def hand_in(self) -> Traced | None:
        """Writes the part and records no more; None when no trace is on. A disk that is full is told in the answer."""
        on, trace, since_ns = self._on, self.trace, self._since_ns
        self.forget()
        if on is None or trace is None:
            return None
        if os.path.basename(on.part) != on.part:
            return Traced(on.session, on.generation, on.number, 0, 0, "the server named a file that is not in the run directory")
        try:
            part = PartWriter(self._run_dir / on.part, trace, since_ns)
            part.write()
        except ReplayError as error:
            return Traced(on.session, on.generation, on.number, 0, 0, str(error)[:MAX_TEXT])
        return Traced(on.session, on.generation, on.number, part.spans, part.dropped, "")

    def forget(self) -> None:
        """Drops what was recorded for the operator: the session it belonged to has ended."""
        self._on, self.trace = None, self._own
