"""A command on a pseudo-terminal: what it drew, keys typed into it, and the terminal's settings before and after."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

_CONTROLS = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")


class Terminal:
    """``with Terminal(command) as terminal:`` starts the command with the terminal as its own, and kills it at the end."""

    def __init__(self, command: Sequence[str], *, columns: int = 100, rows: int = 40, deadline_s: float = 40.0) -> None:
        self._keyboard, self._line = os.openpty()
        fcntl.ioctl(self._line, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._end = time.monotonic() + deadline_s
        self.settings_before = self.settings()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
        environment = {name: value for name, value in environment.items() if value}
        line = self._line
        self._process = subprocess.Popen(command, preexec_fn=lambda: os.login_tty(line), env=environment)
        self._output = b""

    @property
    def output(self) -> str:
        """Everything written so far, as it came."""
        return self._output.decode(errors="replace")

    @property
    def text(self) -> str:
        """The same without the terminal's control sequences."""
        return _CONTROLS.sub("", self.output)

    def settings(self) -> list[Any]:
        return termios.tcgetattr(self._line)

    def press(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_for(self, words: str, since: int = 0) -> int:
        """Returns how much had been written when ``words`` stood in what came after ``since``."""
        while words not in self.text[since:]:
            assert self._read(), f"{words!r} never came; the terminal shows:\n{self.text[-3000:]}"
        return len(self.text)

    def wait(self) -> int:
        """The exit status, all output read."""
        while self._process.poll() is None:
            assert self._read() or self._process.poll() is not None, f"it did not end; the terminal shows:\n{self.text[-3000:]}"
        while select.select([self._keyboard], [], [], 0)[0] and self._read():
            pass
        return self._process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        os.close(self._keyboard)
        os.close(self._line)

    def _read(self) -> bool:
        """Takes what was written within a tenth of a second; False once the deadline has passed."""
        if select.select([self._keyboard], [], [], 0.1)[0]:
            self._output += os.read(self._keyboard, 1 << 16)
        return time.monotonic() < self._end
