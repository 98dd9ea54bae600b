"""What a process holds outside its own memory, and what a piece of work left of it: descriptors, segments, threads, children."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from replay_server_protocol.segment import segment_dir

SEGMENT_PREFIX = "replay-"
_ENDING_S = 0.2
"""The kernel lists a thread that was joined, and what a process held that was waited for, for a moment yet."""


class LeftBehind(AssertionError):
    """The work held something after its end; the message lists it."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """A snapshot; each entry is readable by itself, so that a difference is a message. Children have their commands by pid: one that ends
    before anybody waits for it has none any more, and is the same.

    Other servers may share the machine: a new segment of a run that only strangers' processes map, or one that is gone by the time it is
    looked at, is not ours.
    """

    descriptors: frozenset[str]
    segments: frozenset[str]
    threads: frozenset[str]
    children: Mapping[int, str]

    @classmethod
    def now(cls) -> Holdings:
        """Collects garbage first: what only a cycle still holds is not held."""
        gc.collect()
        return cls(frozenset(_descriptors()), frozenset(_segments()), frozenset(_threads()), dict(_children()))

    def since(self, before: Holdings) -> list[str]:
        """What is held now and wasn't then."""
        segments = {name for name in self.segments - before.segments if not _is_a_strangers(name)}
        return [
            *(f"descriptor {entry}" for entry in sorted(self.descriptors - before.descriptors)),
            *(f"segment {name}" for name in sorted(segments)),
            *(f"thread {entry}" for entry in sorted(self.threads - before.threads)),
            *(f"child {pid}: {command}" for pid, command in self.children.items() if pid not in before.children),
        ]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Raises LeftBehind if the block, ended without an error of its own, holds more than before it.

    What lives at its beginning is not looked through for garbage any more: with torch and thousands of tests in memory that takes 0.2 s.
    """
    before = Holdings.now()
    gc.freeze()
    yield
    left = Holdings.now().since(before)
    if left:
        time.sleep(_ENDING_S)
        left = Holdings.now().since(before)
    if left:
        raise LeftBehind("left behind: " + "; ".join(left))


def _descriptors() -> Iterator[str]:
    """Not those of the GPU's driver, which opens one for each mapping it makes and keeps it; tests/gpu counts device memory instead."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            target = os.readlink(f"/proc/self/fd/{fd}")
            if not target.startswith("/dev/nvidia"):
                yield f"{fd} -> {target}"


def _segments() -> Iterator[str]:
    return (name for name in os.listdir(segment_dir()) if name.startswith(SEGMENT_PREFIX))


def _threads() -> Iterator[str]:
    """Python's threads, and ZeroMQ's own ones, which Python doesn't see; not those of numeric libraries, which stay on purpose."""
    yield from (f"{thread.name} ({thread.native_id})" for thread in threading.enumerate())
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended before it was opened, or read
            name = Path(f"/proc/self/task/{task}/comm").read_text(encoding="ascii", errors="replace").strip()
            if name.startswith("ZMQ"):
                yield f"{name} ({task})"


def _children() -> Iterator[tuple[int, str]]:
    return ((pid, _command(pid)) for pid in _pids() if _parent(pid) == os.getpid())


def _is_a_strangers(segment: str) -> bool:
    run = "-".join(segment.split("-")[:2])
    users = {pid for pid in _pids() if f"{segment_dir() / run}-" in _maps(pid)}
    if any(_is_ours(pid) for pid in users):
        return False
    return bool(users) or not (segment_dir() / segment).exists()


def _is_ours(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = _parent(pid)
    return False


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int:
    stat = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(stat[1]) if len(stat) > 1 else 0


def _command(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()[:120]


def _maps(pid: int) -> str:
    return _read(f"/proc/{pid}/maps")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:  # gone meanwhile, or another user's
        return ""
