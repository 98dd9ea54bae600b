"""The log never makes the server wait."""

from __future__ import annotations

import logging
import os

import pytest

from replay_server.log_lines import LogLines


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("replay_server", logging.WARNING, "", 0, text, None, None)


@pytest.mark.timeout(20)
def test_lines_that_nobody_reads_are_left_out_and_counted_in_the_next_one() -> None:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as stream, open(reader, "rb", buffering=0) as end:
        lines = LogLines(stream)
        for _ in range(3000):
            lines.emit(record("x" * 100))
        assert 2000 < lines.dropped < 3000
        dropped = lines.dropped
        while end.read(4096) and lines.dropped:
            lines.emit(record("read again"))
        rest = os.read(reader, 1 << 20).decode()
        assert f"read again ({dropped}" in rest or "were not read in time" in rest


def test_a_line_is_cut_to_what_a_pipe_takes_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with open(os.dup(2), "w", encoding="utf-8") as stream:
        LogLines(stream).emit(record("x" * 10_000))
    assert len(capfd.readouterr().err) == 4001
