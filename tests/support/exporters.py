"""A real exporter as a child of the test, and what it answers."""

from __future__ import annotations

import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from support.processes import Child, Children

_WITHIN_S = 15.0
_ASK_AGAIN_S = 0.05
Answer = tuple[int, str]


class ExporterProcess:
    """``replay-server export`` on a free port of loopback; ``url`` ends with a slash."""

    def __init__(self, child: Child) -> None:
        self.child = child
        child.wait_for(" at http://")
        found = re.search(r"http://\S+/", child.output)
        assert found is not None
        self.url = found.group()

    def ask(self, path: str, **headers: str) -> Answer:
        """Status and text of the answer to ``path``, whatever the status."""
        request = urllib.request.Request(self.url + path, headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def wait(self, path: str, holds: Callable[[Answer], object]) -> Answer:
        """The first answer for which ``holds``; asks again and again, since another process's state is no event here."""
        end = time.monotonic() + _WITHIN_S
        while not holds(answer := self.ask(path)):
            assert time.monotonic() < end, f"never answered so within {_WITHIN_S} s; the last answer: {answer}"
            time.sleep(_ASK_AGAIN_S)
        return answer

    def stop(self) -> int:
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait()


def export_command(name: str, run_dir: Path, *options: str) -> list[str]:
    place = ["--name", name, "--run-dir", str(run_dir)]
    return [sys.executable, "-m", "replay_server", "export", *place, "--port", "0", "--interval", "0.2", "--timeout", "1", *options]


def spawn_exporter(children: Children, name: str, run_dir: Path, *options: str) -> ExporterProcess:
    return ExporterProcess(children.start(export_command(name, run_dir, *options), name=f"exporter of {name}"))
