"""Children of the doctor: whatever may hang, hangs in one of these, and is killed with its whole process group when its time is over."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from replay_server_protocol.errors import ReplayError, ReplayTimeout

_BURIED_WITHIN_S = 1.0
_MOST_WORDS = 600


class Child:
    """A process of its own group whose lines are read one at a time. It ends when its stdin does, or by ``close``."""

    def __init__(self, command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> None:
        """Raises ReplayError if the command can't be started."""
        self.name = " ".join(command[:6])
        self._end_s = time.monotonic() + limit_s
        self._limit_s = limit_s
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise ReplayError(f"{command[0]} can't be started: {error.strerror}") from error
        assert self._process.stdout is not None
        self._pipe: IO[bytes] = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        self._output = b""
        self._last_words = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def text(self) -> str:
        """All it wrote, once it ended well. Raises ReplayTimeout when its time is over, ReplayError with its last words if it failed."""
        while self._read_more():
            pass
        self._end()
        return self._output.decode(errors="replace")

    def answer(self) -> dict[str, Any]:
        """The next line that is a JSON object; raises as ``text`` does, and ReplayError if it ends without one."""
        while True:
            line, found, rest = self._output.partition(b"\n")
            if found:
                self._output = rest
                self._last_words = line.decode(errors="replace").strip()
                with contextlib.suppress(ValueError):
                    content = json.loads(line)
                    if isinstance(content, dict):
                        return content
            elif not self._read_more():
                self._end()
                raise ReplayError(f"{self.name} said nothing")

    def ask(self) -> None:
        """An empty line to its stdin; a child that is gone is noticed by what it doesn't answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Kills what is left of the group. A process that not even that ends (it waits in the kernel) is left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._pipe):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_BURIED_WITHIN_S)

    def _read_more(self) -> bool:
        """Waits for output. False at its end."""
        poll = select.poll()
        poll.register(self._pipe.fileno(), select.POLLIN)
        left_s = self._end_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise ReplayTimeout(f"{self.name} did not answer within {self._limit_s:g} s")
        piece = os.read(self._pipe.fileno(), 1 << 16)
        self._output += piece
        return bool(piece)

    def _end(self) -> None:
        try:
            code = self._process.wait(max(0.0, self._end_s - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise ReplayTimeout(f"{self.name} did not end within {self._limit_s:g} s") from error
        if code != 0:
            lines = self._output.decode(errors="replace").strip().splitlines()
            said = lines[-1] if lines else self._last_words
            raise ReplayError(said[:_MOST_WORDS] or f"{self.name} ended with {code}")


@contextlib.contextmanager
def started(command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> Iterator[Child]:
    """A child for the length of the block."""
    child = Child(command, limit_s, environment)
    try:
        yield child
    finally:
        child.close()


def output_of(command: Sequence[str], limit_s: float) -> str:
    """What a command wrote. Raises ReplayError if it is missing or failed, ReplayTimeout if it was too slow (it is killed)."""
    with started(command, limit_s) as child:
        return child.text()


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package with this interpreter."""
    return [sys.executable, "-m", module, *arguments]
