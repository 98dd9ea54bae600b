"""The processes of a soak: some stay for the whole time, guests are killed or stopped for a while and replaced; all end with the block."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self

from soaking.place import Place
from soaking.telling import News, Teller

COLLECTORS, LEARNERS = "soaking.collectors", "soaking.learners"
Role = tuple[str, str]
"""Module and function, looked up in the process that plays it: a collector's must not import torch."""

_NUMBERS_EACH = 10_000
_END_WITHIN_S = 60.0
_STOPPED_FOR_S = 1.5


@dataclass
class Member:
    """A process and the parent's end of its pipe. ``kind`` is what its waits count as: write or sample."""

    who: str
    kind: str
    role: Role
    is_guest: bool
    process: SpawnProcess
    pipe: Connection
    continues_s: float | None = None  # when a stopped guest goes on

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


class Crew:
    """Leaving the block kills whoever is left."""

    def __init__(self, place: Place, dice: Any, guest_lives_s: float) -> None:
        """A guest is killed or stopped after ``guest_lives_s`` on average."""
        self.members: list[Member] = []
        self.kills = self.stops = 0
        self.faults: list[str] = []
        self._place = place
        self._dice = dice
        self._guest_lives_s = guest_lives_s
        self._started = 0
        self._next_s = time.monotonic() + self._pause_s()

    @property
    def residents(self) -> list[Member]:
        return [member for member in self.members if not member.is_guest]

    def start(self, learners: dict[str, str]) -> None:
        """``learners`` that stay: names and functions of soaking.learners."""
        for who, role in (("fast", "collect_fast"), ("slow", "collect_slowly"), ("bursty", "collect_in_bursts")):
            self._add(who, "write", (COLLECTORS, role))
        for who, role in learners.items():
            self._add(who, "sample", (LEARNERS, role))
        self._add("guest_collector", "write", (COLLECTORS, "collect_in_bursts"), is_guest=True)
        self._add("guest_learner", "sample", (LEARNERS, "learn_now_and_then"), is_guest=True)

    def news(self) -> list[tuple[Member, News]]:
        """What everybody has told since the last call."""
        found = []
        for member in self.members:
            with contextlib.suppress(EOFError, OSError):
                while member.pipe.poll(0):
                    found.append((member, member.pipe.recv()))
        return found

    def tend(self) -> None:
        """Stops, continues, kills and replaces guests, as the dice say; notes whoever ended by himself as a fault."""
        now_s = time.monotonic()
        for member in list(self.members):
            if member.continues_s is not None and now_s >= member.continues_s:
                os.kill(member.pid, signal.SIGCONT)
                member.continues_s = None
            if not member.process.is_alive():
                self.faults.append(f"{member.who} ended by itself with {member.process.exitcode}")
                self._remove(member)
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._pause_s()
        guests = [member for member in self.members if member.is_guest and member.continues_s is None]
        if guests:
            self._trouble(guests[int(self._dice.integers(len(guests)))], now_s)

    def end(self) -> list[tuple[Member, News]]:
        """Tells everybody that it is over and waits; returns the last news. Who doesn't end in time is a fault."""
        for member in self.members:
            if member.continues_s is not None:
                os.kill(member.pid, signal.SIGCONT)
            with contextlib.suppress(OSError):
                member.pipe.send(None)
        last, end_s = [], time.monotonic() + _END_WITHIN_S
        while any(member.process.is_alive() for member in self.members) and time.monotonic() < end_s:
            last += self.news()
            time.sleep(0.05)
        last += self.news()
        for member in self.members:
            if member.process.is_alive():
                self.faults.append(f"{member.who} did not end within {_END_WITHIN_S:g} s")
            elif member.process.exitcode:
                self.faults.append(f"{member.who} ended with {member.process.exitcode}")
        return last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for member in list(self.members):
            self._remove(member)

    def _trouble(self, guest: Member, now_s: float) -> None:
        if self._dice.random() < 0.4:
            os.kill(guest.pid, signal.SIGSTOP)
            guest.continues_s = now_s + _STOPPED_FOR_S
            self.stops += 1
            return
        self.kills += 1
        self._remove(guest)
        self._add(guest.who, guest.kind, guest.role, is_guest=True)

    def _add(self, who: str, kind: str, role: Role, *, is_guest: bool = False) -> None:
        spawning = multiprocessing.get_context("spawn")
        ours, theirs = spawning.Pipe()
        self._started += 1
        process = spawning.Process(target=_work, args=(role, self._place, theirs, who, self._started * _NUMBERS_EACH), daemon=True)
        process.start()
        theirs.close()
        self.members.append(Member(who, kind, role, is_guest, process, ours))

    def _remove(self, member: Member) -> None:
        """Kills it, if it lives, and forgets it."""
        self.members.remove(member)
        member.process.kill()
        member.process.join()
        member.pipe.close()

    def _pause_s(self) -> float:
        return float(self._dice.exponential(self._guest_lives_s))


def _work(role: Role, place: Place, pipe: Connection, who: str, first: int) -> None:
    """A member's process: what it raises is a fault that it tells."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    teller = Teller(pipe, who)
    module, function = role
    try:
        getattr(importlib.import_module(module), function)(place, teller, first)
    except Exception:  # noqa: BLE001 - the parent counts it as a fault
        teller.fault(traceback.format_exc())
    with contextlib.suppress(OSError):
        teller.tell(now=True)
