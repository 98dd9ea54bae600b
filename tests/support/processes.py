"""Real child processes under an outer deadline: output kept, survivors killed by pid before anything is asserted.

```
with Children(deadline_s=30) as children:
    child = children.run(function, 1, "two")     # or children.script("print('ready', flush=True)")
    child.wait_for("ready")
    assert child.result() == 3
```
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from support.reaper import Reaper

_RESULT = "child result: "
_KILL_WAIT_S = 5.0
_TESTS_DIR = Path(__file__).resolve().parents[1]


class ChildFailed(AssertionError):
    """A child overran its deadline, ended with an error, or outlived its test; the message ends with its output."""


class Child:
    """One child in its own process group. Every wait ends at the child's deadline: then it is killed and ChildFailed raised."""

    reaper: ClassVar[Reaper | None] = None
    """Ends the children of a test run that is killed itself; one for the whole run."""

    def __init__(self, name: str, command: Sequence[str], deadline_s: float, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s
        self._output = bytearray()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        if Child.reaper is not None:
            Child.reaper.watch(self._process.pid)
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        """Everything the child has written so far, both streams in order."""
        self._drain()
        return self._output.decode(errors="replace")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() >= self._end

    def wait_for(self, words: str) -> None:
        """Returns once the child has written ``words``; ChildFailed if it ends without them."""
        while words not in self.output:
            if not self.is_alive() and words not in self.output:
                self._fail(f"ended with {self._process.returncode} before it wrote {words!r}")
            self._sleep(f"did not write {words!r}")

    def wait(self) -> int:
        """The child's exit status; negative for a signal."""
        while self.is_alive():
            self._sleep("did not end")
            self._drain()
        return self._process.returncode

    def result(self) -> Any:
        """What the function of ``Children.run`` returned; ChildFailed if the child failed."""
        if self.wait() != 0:
            self._fail(f"ended with {self._process.returncode}")
        for line in reversed(self.output.splitlines()):
            if line.startswith(_RESULT):
                return json.loads(line.removeprefix(_RESULT))
        return None

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the child's process group, so also to what it started; returns when the child is gone. Safe to call twice."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(_KILL_WAIT_S)
        self._drain()

    def close(self) -> bool:
        """Kills the child if it still lives, closes what is held of it, and says whether it lived."""
        has_survived = self.is_alive()
        self.kill()
        if not self._pipe.closed:
            self._pipe.close()
            os.close(self._pidfd)
            if Child.reaper is not None:
                Child.reaper.forget(self.pid)
        return has_survived

    def _sleep(self, missing: str) -> None:
        """Until there is output, the child ended, or its deadline passed."""
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            self._fail(f"{missing} within {self.deadline_s:g} s")
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(self._pipe.fileno(), select.POLLIN)
        if [event for _, event in poll.poll(left_s * 1000)] == [select.POLLHUP]:  # it closed its output and lives on
            select.select([self._pidfd], [], [], left_s)

    def _drain(self) -> None:
        while not self._pipe.closed:
            try:
                piece = os.read(self._pipe.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not piece:
                return
            self._output += piece

    def _fail(self, what: str) -> None:
        self.kill()
        raise ChildFailed(f"{self.name} (pid {self.pid}) {what}; its output:\n{textwrap.indent(self.output, '    ')}")


class Children:
    """All children of a test. At the end survivors are killed first, then ChildFailed names them unless the test failed already."""

    def __init__(self, deadline_s: float = 60.0) -> None:
        self.deadline_s = deadline_s
        self._children: list[Child] = []

    def start(self, command: Sequence[str], *, name: str | None = None, deadline_s: float | None = None, **environment: str) -> Child:
        """Starts ``command``; keywords are variables of its environment."""
        child = Child(name or Path(command[0]).name, command, deadline_s or self.deadline_s, environment)
        self._children.append(child)
        return child

    def script(self, source: str, *arguments: str, deadline_s: float | None = None) -> Child:
        """Runs Python source; ``tests`` is on its path, so it may import ``support``."""
        path = os.pathsep.join(filter(None, (str(_TESTS_DIR), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-u", "-c", textwrap.dedent(source), *arguments]
        return self.start(command, name="script", deadline_s=deadline_s, PYTHONPATH=path)

    def run(self, function: Callable[..., object], *arguments: object, deadline_s: float | None = None) -> Child:
        """Runs a function by its source: it imports what it needs itself; arguments and result are plain JSON values."""
        source = textwrap.dedent(inspect.getsource(function))
        call = f"print({_RESULT!r} + json.dumps({function.__name__}(*json.loads(sys.argv[1]))))"
        child = self.script(
            f"from __future__ import annotations\nimport json, sys\n{source}\n{call}", json.dumps(arguments), deadline_s=deadline_s
        )
        child.name = function.__name__
        return child

    def close(self) -> list[str]:
        """Kills every survivor and returns their names."""
        survivors = [f"{child.name} (pid {child.pid})" for child in self._children if child.close()]
        self._children.clear()
        return survivors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        survivors = self.close()
        if survivors and error is None:
            raise ChildFailed(f"still alive at the end of the test: {', '.join(survivors)}")
