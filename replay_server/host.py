"""The servers of one host, one a GPU: started by name, watched, started again when one dies, stopped together.

```
           ┌──────────── ended by a fault, once it had served: again after 0.5, 1, 2 … 30 s ─────────────┐
           ▼                                                                                             │
start ─► RUNNING ──┬── ended with 0 (`replay-server stop`) ─► it stays stopped; after the last one: 0    │
                   ├── ended by a fault ─────────────────────────────────────────────────────────────────┘
                   └── ended at its first start, saying why (exit codes 2 to 6) ─► all are stopped: that code
```

A server that lived for a minute begins with the shortest wait again. The next server of a name takes away what a killed one left.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import InvalidRequest

from replay_server.stop_signals import StopSignals

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_LIVED_LONG_S = 60.0
_AT_ITS_START_S = 10.0
_STOP_S = 15.0
_LONGEST_NAP_S = 60.0
_SAID_WHY = range(2, 7)
"""Exit codes of what another start would not mend: options, name, memory, device, refused."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One server: its name, where its ring lives, and the other options of ``serve``, as texts."""

    name: str
    device: str
    options: tuple[str, ...]


def plans_of(name: str, devices: Sequence[str], options: Mapping[str, str]) -> list[Plan]:
    """``NAME-0``, ``NAME-1``, …, in the order of the devices. Each writes its ``trace`` to a file of its own, with its name in it."""
    plans = []
    for place, device in enumerate(devices):
        own = {**options}
        if "trace" in own:
            path = Path(own["trace"])
            own["trace"] = str(path.with_name(f"{path.stem}-{place}{path.suffix}"))
        texts = [text for key, value in own.items() for text in (f"--{key.replace('_', '-')}", value)]
        plans.append(Plan(f"{name}-{place}", device, tuple(texts)))
    return plans


def devices_of(gpus: str, count: Callable[[], int]) -> list[str]:
    """The devices that ``--gpus`` names: ``all``, or ordinals with commas. ``count`` counts the visible GPUs. Raises InvalidRequest."""
    parts = gpus.split(",")
    if gpus != "all" and not all(part.isascii() and part.isdecimal() for part in parts):
        raise InvalidRequest(f"--gpus {gpus!r}: all, or ordinals like 0,1")
    there = count()
    ordinals = list(range(there)) if gpus == "all" else [int(part) for part in parts]
    if len(set(ordinals)) != len(ordinals) or not all(ordinal < there for ordinal in ordinals):
        raise InvalidRequest(f"--gpus {gpus}: different ones of the {there} that are visible (CUDA_VISIBLE_DEVICES), counted from 0")
    return [f"cuda:{ordinal}" for ordinal in ordinals]


class Watched:
    """One server's process over its restarts. ``ended`` is its exit status once it is not to be started again."""

    def __init__(self, plan: Plan, run_dir: Path) -> None:
        self.plan = plan
        self.ended: int | None = None
        self.start_at_s = 0.0
        self._run_dir = run_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._starts = 0
        self._wait_s = _FIRST_WAIT_S

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self, now_s: float) -> None:
        """In a session of its own: Ctrl-C reaches the watcher alone, which stops all in good order."""
        command = [sys.executable, "-m", "replay_server", "serve", "--parent-pid", str(os.getpid()), "--run-dir", str(self._run_dir)]
        command += ["--name", self.plan.name, "--device", self.plan.device, *self.plan.options]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._started_s, self._starts = now_s, self._starts + 1

    def look(self, now_s: float) -> str | None:
        """What has happened to it since the last look, in words; None if nothing has."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        self._process, lived_s = None, now_s - self._started_s
        if status == 0:
            self.ended = 0
            return "stopped in good order"
        told = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        if status in _SAID_WHY and self._starts == 1 and lived_s < _AT_ITS_START_S:
            self.ended = status
            return f"{told} at its start"
        self._wait_s = _FIRST_WAIT_S if lived_s > _LIVED_LONG_S else self._wait_s
        self.start_at_s = now_s + self._wait_s
        told = f"{told} after {lived_s:.1f} s; it starts again in {self._wait_s:g} s"
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        return told

    def send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def give_up(self) -> None:
        """Not running, and not to be started again."""
        if self._process is None and self.ended is None:
            self.ended = 1


class HostServers:
    """All of them. ``tell`` takes one line for each event."""

    def __init__(self, plans: Sequence[Plan], run_dir: str | None, signals: StopSignals, tell: Callable[[str], None]) -> None:
        """Raises InvalidRequest for a name or run directory that no server could have."""
        endpoints = [Endpoints.resolve(plan.name, run_dir) for plan in plans]
        self._servers = [Watched(plan, found.run_dir) for plan, found in zip(plans, endpoints, strict=True)]
        self._signals = signals
        self._tell = tell
        self._poll = select.poll()
        self._poll.register(signals.fileno(), select.POLLIN)

    def run(self) -> int:
        """Until a signal, or until all were stopped or one can't be started; the exit code. Leaves no process."""
        before = signal.signal(signal.SIGCHLD, lambda *_: None)  # so that a child's end wakes the poll, through the wakeup descriptor
        try:
            while not self._signals.take() and not self._is_over():
                self._start_due()
                self._sleep(min((s.start_at_s for s in self._servers if s.pid is None and s.ended is None), default=None))
                self._look()
            return self._stop()
        finally:
            signal.signal(signal.SIGCHLD, before)

    def _is_over(self) -> bool:
        return any(server.ended for server in self._servers) or all(server.ended == 0 for server in self._servers)

    def _start_due(self) -> None:
        now_s = time.monotonic()
        for server in self._servers:
            if server.pid is None and server.ended is None and now_s >= server.start_at_s:
                server.start(now_s)
                self._tell(f"{server.plan.name} started on {server.plan.device} (pid {server.pid})")

    def _look(self) -> None:
        for server in self._servers:
            if told := server.look(time.monotonic()):
                self._tell(f"{server.plan.name} {told}")

    def _sleep(self, until_s: float | None) -> None:
        nap_s = _LONGEST_NAP_S if until_s is None else until_s - time.monotonic()
        self._poll.poll(max(0.0, min(nap_s, _LONGEST_NAP_S)) * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._signals.fileno(), 512)

    def _stop(self) -> int:
        """Stops all, by force what hasn't ended in _STOP_S; each further signal is passed on, which ends a server at once."""
        code = max((server.ended or 0 for server in self._servers), default=0)
        running = [server for server in self._servers if server.pid is not None]
        if running:
            self._tell(f"stopping {', '.join(server.plan.name for server in running)}")
        for server in running:
            server.send(signal.SIGTERM)
        end_s = time.monotonic() + _STOP_S
        while running:
            self._sleep(min(end_s, time.monotonic() + 1.0))
            if time.monotonic() >= end_s:
                self._tell(f"killing {', '.join(server.plan.name for server in running)}, {_STOP_S:g} s after they were told to stop")
            again = signal.SIGKILL if time.monotonic() >= end_s else signal.SIGTERM if self._signals.take() else None
            for server in running if again else ():
                server.send(again)  # type: ignore[arg-type]
            self._look()
            running = [server for server in running if server.pid is not None]
        for server in self._servers:
            server.give_up()
        return code
