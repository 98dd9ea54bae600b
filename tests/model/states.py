"""What the model's states are made of: immutable, hashable, without a clock.

Time is kept the other way round: nothing says what time it is, every deadline says how many ticks are left (-1: it has passed). So states
that differ only in when they happen are one state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from replay_server_protocol.messages import Credit, Grant, Publish, Release, Sample
from replay_server_protocol.states import BufferState, SlotState


class Row(NamedTuple):
    """What a row holds is who wrote it: collector, its publish (counted over all its sessions, from 1), offset in the span."""

    collector: int
    publish: int
    offset: int


NOTHING = Row(-1, 0, 0)
"""Memory that was never written."""


class Segment(NamedTuple):
    """A session's slots as they lie in memory. ``base`` publishes of this collector went before the session."""

    session: int
    collector: int
    base: int
    slots: tuple[tuple[Row, ...], ...]


class Collector(NamedTuple):
    """A collector's process. ``publishes`` counts over all its sessions, ``number`` in this one."""

    name: str
    session: int
    generation: int
    slots: tuple[SlotState, ...]
    unanswered: tuple[Publish, ...] = ()
    number: int = 0
    publishes: int = 0
    sessions: int = 1
    is_alive: bool = True
    to_server: tuple[Publish, ...] = ()
    from_server: tuple[Credit, ...] = ()


class Learner(NamedTuple):
    """A learner's process, with one batch buffer. ``number`` is its request's, ``batches`` how many it has had.

    ``seen_lease`` is the newest lease whose grant has come in this session. ``fault`` says what the gather read: None before it, "" for
    true rows. ``is_late`` is what the clock said after it, None before.
    """

    name: str
    session: int
    generation: int
    buffer: BufferState = BufferState.FREE
    number: int = 1
    batches: int = 0
    grant: Grant | None = None
    seen_lease: int = 0
    fault: str | None = None
    is_late: bool | None = None
    sessions: int = 1
    is_alive: bool = True
    to_server: tuple[Sample | Release, ...] = ()
    from_server: tuple[Grant, ...] = ()


class Attached(NamedTuple):
    """A collector's session at the server."""

    session: int
    is_ended: bool
    slots: tuple[SlotState, ...]
    taken: int = 0
    credited: int = 0
    queued: int = 0
    published_rows: int = 0
    committed_rows: int = 0
    last_committed_seq: int = 0
    previous: tuple[int, tuple[int, ...], tuple[int, ...], bool] | None = None  # as LinkedSpan has it, of the span before


class Held(NamedTuple):
    """An open lease. ``left`` are ticks to its deadline."""

    lease: int
    session: int
    number: int
    tail: int
    committed: int
    left: int


class Server(NamedTuple):
    """What the daemon knows. ``learners``: the sessions of learners that are open."""

    generation: int
    collectors: tuple[Attached, ...]
    learners: tuple[int, ...]
    reserved: int = 0
    committed: int = 0
    queue: tuple[Publish, ...] = ()
    in_flight: tuple[tuple[Publish | None, int], ...] = ()  # publish, first seq; None: a lone write
    leases: tuple[Held, ...] = ()
    requests: tuple[Sample, ...] = ()
    inserted: int = 0
    sampled: int = 0

    @property
    def underway(self) -> tuple[Publish, ...]:
        """Publishes that were taken and are not committed."""
        return (*self.queue, *(publish for publish, _ in self.in_flight if publish is not None))


class CopyRows(NamedTuple):
    """The stream reads ``rows`` rows of a slot, from ``offset`` on, whenever it comes to it."""

    ring_index: int
    session: int
    slot: int
    offset: int
    rows: int


class WriteLinks(NamedTuple):
    """The stream writes a run of the link column."""

    ring_index: int
    links: tuple[int, ...]


Ticket = tuple[CopyRows | WriteLinks, ...]
"""What is left to do of one ticket; empty: its event is complete."""


class Device(NamedTuple):
    """The ring's memory and the one copy stream."""

    rows: tuple[Row, ...]
    links: tuple[int, ...]
    stream: tuple[Ticket, ...] = ()


class Past(NamedTuple):
    """The ring of a dead generation, which a learner still maps: nothing is copied into it any more."""

    generation: int
    device: Device
    ledger: tuple[Row, ...]


class Faults(NamedTuple):
    """How many faults may still happen. ``breaks`` drop what is under way one way; ``repeats`` are those that nobody needs."""

    deaths: int = 0
    breaks: int = 0
    repeats: int = 0
    partings: int = 0  # a living client's connection is gone for 10 s: its session ends
    restarts: int = 0


NO_FAULTS = Faults()


class State(NamedTuple):
    """One moment of everybody. ``ledger`` is the observer's: which row was promised for each seq of this generation."""

    server: Server
    device: Device
    collectors: tuple[Collector, ...]
    learners: tuple[Learner, ...]
    segments: tuple[Segment, ...]
    ledger: tuple[Row, ...]
    faults: Faults
    pasts: tuple[Past, ...] = ()

    def ring_of(self, generation: int) -> tuple[Device, tuple[Row, ...]]:
        """A generation's ring as a learner that maps it sees it, and its ledger."""
        if generation == self.server.generation:
            return self.device, self.ledger
        return next((past.device, past.ledger) for past in self.pasts if past.generation == generation)

    def having(self, client: Collector | Learner) -> State:
        """The state in which the client of that name is ``client``."""
        if isinstance(client, Collector):
            return self._replace(collectors=tuple(client if x.name == client.name else x for x in self.collectors))
        return self._replace(learners=tuple(client if x.name == client.name else x for x in self.learners))

    @property
    def clients(self) -> tuple[Collector | Learner, ...]:
        return (*self.collectors, *self.learners)

    def is_open(self, client: Collector | Learner) -> bool:
        """Whether the client's session is open at the server."""
        return client.generation == self.server.generation and client.session in self.open_sessions

    @property
    def open_sessions(self) -> tuple[int, ...]:
        return (*self.server.learners, *(x.session for x in self.server.collectors if not x.is_ended))


@dataclass(frozen=True)
class Sizes:
    """How large the explored world is.

    ``spans``: the rows of a collector's publishes, in turn; of each row its lane, or ``~lane`` where no link leads into it.
    """

    collectors: int = 1
    publishes: int = 2
    depth: int = 1
    learners: int = 1
    batches: int = 1
    capacity: int = 1
    headroom: int = 1
    lease_ticks: int = 0
    spans: tuple[tuple[int, ...], ...] = ((0,),)
    has_links: bool = False
    samples_per_insert: float | None = None
    tolerance: int = 0
    faults: Faults = NO_FAULTS

    @property
    def ring_rows(self) -> int:
        return self.capacity + self.headroom

    @property
    def lanes(self) -> int:
        return 1 + max(max(lane, ~lane) for span in self.spans for lane in span)

    @property
    def slot_rows(self) -> int:
        return max(len(span) for span in self.spans)

    def lanes_of(self, publish: int) -> tuple[int, ...]:
        return self.spans[(publish - 1) % len(self.spans)]

    def rows_of(self, collector: int, publish: int) -> tuple[Row, ...]:
        return tuple(Row(collector, publish, offset) for offset in range(len(self.lanes_of(publish))))
