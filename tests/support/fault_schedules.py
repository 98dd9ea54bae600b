"""What a seed means: a small cast, the server's options, and faults at times or at named points of the data path. Pure; see ``draw``."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

COLLECTOR_POINTS = ("send Mapped", "send Publish", "sent Publish", "credit", "send Explain")
LEARNER_POINTS = ("send Proof", "send Sample", "sent Sample", "granted", "gathering", "gathered", "send Release", "sent Release", "lend")
MAIL_POINTS = ("send MailPost", "send MailWritten", "sent MailWritten")
SERVER_POINTS = (
    *("send Welcome", "send SegmentLent", "send RingAt", "send Proved"),
    *("reserved", "submitted", "event seen", "send Credit", "sent Credit", "send Grant", "sent Grant", "send MailSlot", "send Done"),
)
STOPS_MS = (5, 50, 150, 300, 800)
WORK_MS = 500


@dataclass(frozen=True, slots=True)
class CollectorPart:
    """How one collector behaves; ``p_`` are probabilities a write."""

    collector: int
    lanes: int
    steps: int
    pause_ms: float
    p_masked: float
    p_flush: float
    p_slot: float
    p_latest: float

    @property
    def name(self) -> str:
        return f"c{self.collector}"


@dataclass(frozen=True, slots=True)
class LearnerPart:
    """How one learner behaves. ``drives``: it calls ``progress()`` itself instead of leaving that to its thread."""

    learner: int
    way: Literal["uniform", "priority", "sequences", "n_step"]
    n: int
    length: int
    prefetch: int
    drives: bool
    pause_ms: float
    p_post: float

    @property
    def name(self) -> str:
        return f"l{self.learner}"


Part = CollectorPart | LearnerPart
What = Literal["kill", "stop", "fork", "close", "restart"]


@dataclass(frozen=True, slots=True)
class Fault:
    """``what`` happens to ``who`` ("server" or a part's name), at ``at_ms`` after the start of work, or at the ``passes``-th time it
    comes to ``point``. ``for_ms`` is the length of a stop, or how long the server's name stays free; ``how`` says more."""

    who: str
    what: What
    at_ms: int
    point: str = ""
    passes: int = 0
    for_ms: int = 0
    how: str = ""

    def __str__(self) -> str:
        when = f"at {self.at_ms} ms" if not self.point else f"at pass {self.passes} of {self.point!r}"
        length = f" for {self.for_ms} ms" if self.for_ms else ""
        return f"{self.what} {self.who}{f' ({self.how})' if self.how else ''}{length} {when}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """``newcomers`` join when the fault of the same place in ``faults`` has killed somebody; None there: nobody does."""

    seed: int
    options: tuple[str, ...]
    has_schema: bool
    depth: int
    capacity: int
    lease_s: float
    parts: tuple[Part, ...]
    faults: tuple[Fault, ...]
    newcomers: tuple[Part | None, ...]

    def lines(self) -> list[str]:
        """For people: the cast and the faults."""
        joins = [f"; then joins {part}" if part is not None else "" for part in self.newcomers]
        return [
            f"seed {self.seed}",
            f"server {' '.join(self.options)}{' --schema' if self.has_schema else ''}",
            *(str(part) for part in self.parts),
            *(f"{fault}{join}" for fault, join in zip(self.faults, joins, strict=True)),
        ]


def draw(seed: int) -> Schedule:
    """The schedule of a seed. Collector 0 is never killed, so that there is always somebody who must go on."""
    rng = random.Random(seed)
    slot_rows, capacity = rng.choice((8, 16, 32)), rng.choice((64, 200, 1000))
    lease_s, depth = rng.choice((0.1, 0.2, 0.4)), rng.randint(1, 4)
    options = [
        *("--capacity", str(capacity), "--slot-rows", str(slot_rows), "--headroom", str(slot_rows * rng.randint(1, 4))),
        *("--depth", str(depth), "--lease", str(lease_s), "--columns", "link,priority", "--mailbox-bytes", "1MiB"),
    ]
    if rng.random() < 0.25:
        options += ["--debug-copy-delay", str(rng.choice((0.002, 0.01)))]
    parts: list[Part] = [_collector(rng, number) for number in range(rng.randint(1, 3))]
    parts += [_learner(rng, number, capacity) for number in range(rng.choice((0, 1, 1, 2, 2)))]
    faults = _faults(rng, parts)
    newcomers = [_newcomer(rng, fault, parts, place, capacity) for place, fault in enumerate(faults)]
    return Schedule(seed, tuple(options), rng.random() < 0.8, depth, capacity, lease_s, tuple(parts), tuple(faults), tuple(newcomers))


def _collector(rng: random.Random, number: int) -> CollectorPart:
    return CollectorPart(
        collector=number,
        lanes=rng.randint(1, 4),
        steps=rng.choice((1, 3, 10, 40)),
        pause_ms=rng.choice((2.0, 6.0, 15.0)),
        p_masked=rng.choice((0.0, 0.0, 0.3)),
        p_flush=rng.choice((0.0, 0.05, 0.5)),
        p_slot=rng.choice((0.0, 0.0, 0.3)),
        p_latest=rng.choice((0.0, 0.2)),
    )


def _learner(rng: random.Random, number: int, capacity: int) -> LearnerPart:
    n, length = (4, 4) if capacity < 100 else (16, 8)
    return LearnerPart(
        learner=number,
        way=rng.choice(("uniform", "uniform", "priority", "sequences", "n_step")),
        n=n,
        length=length,
        prefetch=rng.randint(0, 3),
        drives=rng.random() < 0.2,
        pause_ms=rng.choice((2.0, 6.0, 15.0)),
        p_post=rng.choice((0.0, 0.1)),
    )


def _faults(rng: random.Random, parts: list[Part]) -> list[Fault]:
    """One to four, of which at most one restarts the server and at most one waits at a point for each party."""
    faults: list[Fault] = []
    doomed: set[str] = set()
    armed: set[str] = set()
    for _ in range(rng.randint(1, 4)):
        who = rng.choice(["server", *(part.name for part in parts)])
        at_ms = rng.randint(0, WORK_MS - 50)
        kinds: tuple[What, ...] = ("stop", "restart") if who == "server" else ("kill", "stop", "stop", "fork", "close")
        what = rng.choice(kinds)
        if who in doomed or (who == "c0" and what == "kill"):
            what = "stop"
        if what == "restart" and any(fault.what == "restart" for fault in faults):
            what = "stop"
        point, passes = ("", 0)
        if what in ("kill", "stop", "restart") and who not in armed and rng.random() < 0.6:
            armed.add(who)
            point, passes = _point(rng, who), rng.choice((1, 1, 2, 3, 5, 10, 30))
        how = {"restart": rng.choice(("kill", "term")), "fork": rng.choice(("uses", "exits", "killed", "outlives"))}.get(what, "")
        for_ms = {"stop": rng.choice(STOPS_MS), "restart": rng.choice((0, 20, 200))}.get(what, 0)
        if what == "kill":
            doomed.add(who)
        faults.append(Fault(who, what, at_ms, point, passes, for_ms, how))
    return faults


def _point(rng: random.Random, who: str) -> str:
    if who == "server":
        return rng.choice(SERVER_POINTS)
    return rng.choice(COLLECTOR_POINTS if who.startswith("c") else (*LEARNER_POINTS, *LEARNER_POINTS, *MAIL_POINTS))


def _newcomer(rng: random.Random, fault: Fault, parts: list[Part], place: int, capacity: int) -> Part | None:
    if fault.what != "kill" or rng.random() < 0.4:
        return None
    number = len(parts) + place
    return _collector(rng, number) if fault.who.startswith("c") else _learner(rng, number, capacity)
