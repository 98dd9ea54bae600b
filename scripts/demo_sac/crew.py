"""The learner's and the collectors' processes: started with a fresh interpreter each, watched, and ended together."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Self, cast

from collect import collect
from plan import Plan
from reports import Episodes, Finished

END_S = 5.0

Target = Callable[..., None]


class CrewError(Exception):
    """A process of the crew ended before its work was done; its own error stands above on standard error."""


class Crew:
    """One learner and ``plan.collectors`` collectors. Leaving the block ends every process that is left, however it is left."""

    def __init__(self, plan: Plan, learner: Target | None = None, collector: Target = collect) -> None:
        """``learner(plan, link)`` and ``collector(plan, ordinal, link)`` are what the processes run."""
        self._plan = plan
        self._targets = (learner or run_learner, collector)
        self._processes: dict[Connection, SpawnProcess] = {}
        self._finished: dict[Connection, Finished] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self.end)
            with interrupts_ignored():
                learner, collector = self._targets
                self._start("learner", learner, (self._plan,))
                for ordinal in range(self._plan.collectors):
                    self._start(f"collector-{ordinal}", collector, (self._plan, ordinal))
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def has_finished(self) -> bool:
        return len(self._finished) == len(self._processes)

    @property
    def finished(self) -> tuple[Finished, ...]:
        """What those who have finished say of their work."""
        return tuple(self._finished.values())

    def reports(self, timeout_s: float) -> Iterator[Episodes]:
        """The episodes that are reported within ``timeout_s``, as they come. Raises CrewError when a process ended too early."""
        end = time.monotonic() + timeout_s
        while not self.has_finished and (left := end - time.monotonic()) > 0:
            for link in cast("list[Connection]", wait(self._processes.keys() - self._finished.keys(), left)):
                try:
                    report = link.recv()
                except (EOFError, ConnectionError):
                    raise self._ended(link) from None
                if isinstance(report, Finished):
                    self._finished[link] = report
                else:
                    yield report

    def dismiss(self) -> None:
        """Lets processes that have finished detach and end."""
        for link in self._finished:
            with contextlib.suppress(OSError):
                link.send(None)
        for link in self._finished:
            self._processes[link].join(END_S)

    def end(self) -> None:
        """Ends what still runs: the server sees the sessions die and gives back what they held."""
        for process in self._processes.values():
            process.terminate()
        for link, process in self._processes.items():
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join()
            link.close()
        self._processes = {}

    def _start(self, name: str, target: Target, args: tuple[object, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=target, name=name, args=(*args, there), daemon=True)
        process.start()
        there.close()
        self._processes[here] = process

    def _ended(self, link: Connection) -> CrewError:
        process = self._processes[link]
        process.join(END_S)
        return CrewError(f"{process.name} ended early with exit code {process.exitcode}; its error stands above")


def run_learner(plan: Plan, link: Connection) -> None:
    """Imports torch only here, in the learner's own process."""
    from learn import learn

    learn(plan, link)


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Processes started inside inherit it: Ctrl-C reaches the whole terminal group, and only the main process is to act on it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
