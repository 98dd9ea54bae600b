"""The closed set of messages, in the order of a session's life.

Every message but HELLO carries the session and the generation it belongs to; the receiver refuses older ones with STALE and counts
them. Numbers that count (publishes, requests, leases) start at 1. Times are CLOCK_MONOTONIC of the one host, in nanoseconds.

```
collector                server                    learner                    server
  HELLO ────────────────►                            HELLO ────────────────────►
  ◄──────────────── WELCOME                          ◄──────────────────── WELCOME
  ◄─────────────── SEGMENT (once the ring exists)    ◄─────────────────────── RING (once it exists)
  MAPPED ───────────────► unlinks the name           PROOF 1 ──────────────────►
  PUBLISH 1, 2 … ───────► drain, copy, commit        ◄──────────────── CHALLENGE
  ◄─────────────── CREDIT (all up to a number)       PROOF 2 ──────────────────► may ask for batches
  BYE ──────────────────►                            SAMPLE ───────────────────►
                                                     ◄─────────────────────── GRANT (opens a lease)
                                                     RELEASE ──────────────────► ends it
                                                     UNUSED ───────────────────► its rows count no more
```
TRACE_ON and TRACE_OFF tell collectors and learners to record what they do; they hand it in as a file and say so by TRACED.
An observer attaches as a learner does; its OBSERVE, which a learner may send too, is answered by GRANT at once, its CAPTURE by CAPTURED.
REFUSED may answer any request; EXPLAIN asks what a wait is waiting for; CLOSING says that the server stops.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from replay_server_protocol.errors import Detail

PROTOCOL_VERSION = 2
"""Both sides must have the same one; docs/protocol.md says what raises it."""
MAX_MESSAGE_BYTES = 4 << 20
MAX_TEXT = 4096

Count = Annotated[int, 0, 2**63 - 1]
Token = Annotated[int, 1, 2**63 - 1]
Signed = Annotated[int, -(2**63), 2**63 - 1]
Name = Annotated[str, 64]
Text = Annotated[str, MAX_TEXT]
ShortBytes = Annotated[bytes, 64]
Bytes = Annotated[bytes, MAX_MESSAGE_BYTES]
Details = Annotated[dict[str, Detail], 64]
Share = Annotated[float, 0.0, 1.0]
Wire = Annotated[dict[str, object], 512]  # a schema or a manifest: checked again by its own reader

Role = Literal["collector", "learner", "admin", "observer"]
Transport = Literal["cuda_ipc", "shared_memory", "staged"]
"""How rows come from the ring to its reader: the first two with no copy in between, the last through host memory to another device."""


class Hello(NamedTuple):
    """A client asks for a session. ``nonce`` is new for every attempt to attach and the same in its repeats."""

    version: Count
    nonce: Token
    role: Role
    name: Name
    pid: Count
    start_ticks: Count
    pid_namespace: Count
    run_id: Name | None
    schema: Wire | None  # collector: its schema; learner: what it expects, if anything
    lanes: Count  # collector: environments it interleaves
    counted: bool  # collector: rows count for samples-per-insert
    rows_lost: Count  # 0: MAPPED tells it, which is not sent by a client that gave this attach up
    device_uuid: Name | None  # learner or observer on CUDA: the GPU it will map the ring on


class Welcome(NamedTuple):
    """The session is open. The client proves the clock: its time before HELLO <= ``monotonic_ns`` <= its time now."""

    session: Token
    generation: Token
    nonce: Token
    monotonic_ns: Count
    pid: Count
    start_ticks: Count
    run_id: Name
    phase: Name
    seed: Signed
    ordinal: Count  # how many sessions of this role were opened before
    lease_ns: Count


class SegmentLent(NamedTuple):
    """A collector's slots: ``depth`` of ``slot_rows`` rows each, every ``slot_bytes``; all of them are credits from now on."""

    session: Token
    generation: Token
    segment: Name
    depth: Count
    slot_rows: Count
    slot_bytes: Count
    schema: Wire
    moments: list[Name]
    nonfinite: Literal["reject", "count", "allow"]
    links: bool  # publishes must say which lane each row belongs to
    finite: list[Name] | None = None  # fields the non-finite policy looks at; None: the reward
    return_gamma: Share = 0.99  # discount of the running return, where ``moments`` names it
    copied_as: Text = "memory"  # how the slots are copied into the ring: memory, pinned, or pageable and why
    resumes: bool = False  # publishes name their origin, and those that a lost session had no credit for may be published again


class Mapped(NamedTuple):
    """A collector has its slots. ``rows_lost``: rows of it that died with earlier generations and were told to none since."""

    session: Token
    generation: Token
    rows_lost: Count = 0


class Publish(NamedTuple):
    """Slot ``slot`` is handed over: its first ``rows`` rows are whole. Repeated with the same number until credited.

    ``lanes`` (only when the server keeps links): one int32 a row, the row's lane, or ``~lane`` where no link leads into the row;
    empty when the rows are whole steps over all lanes in order and nothing is cut.
    ``moments``: for each field of SegmentLent.moments one entry, as replay_server_protocol.moments packs it.
    ``episodes``: those whose last row is here, as replay_server_protocol.episodes packs them; empty when there is none.
    ``versions``: rows by the version of their policy, as replay_server_protocol.versions packs them; empty when rows carry none.
    """

    session: Token
    generation: Token
    number: Token
    slot: Count
    rows: Count
    masked: Count  # rows left out by a mask since the last publish
    rejected: Count  # rows dropped by the non-finite policy since the last publish
    nonfinite: Count  # rows with a non-finite value in a checked field
    lanes: Bytes
    moments: list[Bytes]
    episodes: Bytes = b""
    versions: Bytes = b""
    mailbox: Name = ""  # whose versions they are; empty when the collector's user gave them
    nonfinite_field: Name = ""  # where the first of the rows rejected or nonfinite was seen; empty without one
    nonfinite_row: Count = 0  # its number among the rows this session has placed, from 0
    origin: Name = ""  # whose it is, also when others pass it on: the collector's random name; see replay_server_protocol.origins
    origin_number: Count = 0  # the publish's number there: one that was taken before is credited and its rows left out
    origin_first: Count = 0  # the first number there without an answer


class Credit(NamedTuple):
    """Every publish up to ``number`` is committed; ``committed`` covers their rows. Their slots may be filled again."""

    session: Token
    generation: Token
    number: Count
    committed: Count


class RingAt(NamedTuple):
    """Where the ring is, and a cell whose random pattern the learner must read back (twice) before it may ask for batches."""

    session: Token
    generation: Token
    storage: Literal["cpu", "cuda", "host"]
    handle: Annotated[bytes, 128]  # cpu, host: the segment's name; cuda: the 64-byte IPC handle
    device_uuid: Name | None
    alloc_bytes: Count
    ring_rows: Count
    capacity: Count
    schema: Wire
    link_offset: Count | None  # byte offset of the int64 link column, if it is kept
    priority_offset: Count | None
    overlay_offset: Count | None  # of the mutable fields' newest values, if the schema has such fields
    proof_offset: Count


class Proof(NamedTuple):
    """What the cell holds, seen through the mapping, and how rows will come to this client."""

    session: Token
    generation: Token
    step: Annotated[int, 1, 2]
    pattern: ShortBytes
    transport: Transport = "shared_memory"


class Challenge(NamedTuple):
    """The first pattern was right and a second one is in the cell."""

    session: Token
    generation: Token


class Proved(NamedTuple):
    """The mapping is proved: SAMPLE is allowed."""

    session: Token
    generation: Token


class Sample(NamedTuple):
    """A learner asks for a lease to draw ``rows`` rows. The same (sampler, number) again replaces the waiting request."""

    session: Token
    generation: Token
    sampler: Count
    number: Token
    rows: Token
    min_committed: Count
    max_age_rows: Token | None  # draw only from the newest so many rows


class Grant(NamedTuple):
    """A lease on the window [tail, committed) until ``deadline_ns``."""

    session: Token
    generation: Token
    sampler: Count
    number: Token
    lease: Token
    tail: Count
    committed: Count
    deadline_ns: Count


class Release(NamedTuple):
    """The lease ends. ``is_used`` is false when the batch was dropped: its rows don't count as sampled."""

    session: Token
    generation: Token
    lease: Token
    is_used: bool


class Unused(NamedTuple):
    """A batch of ``rows`` rows, released as used, was dropped before anybody had it: its rows don't count as sampled after all."""

    session: Token
    generation: Token
    rows: Token


class Cancel(NamedTuple):
    """A waiting SAMPLE is no longer wanted."""

    session: Token
    generation: Token
    sampler: Count
    number: Token


class Observe(NamedTuple):
    """A learner or an observer asks for a lease to copy rows out of the window: granted at once, outside flow control, counted nowhere.

    The same (sampler, number) again while that lease is open gets the same grant again.
    """

    session: Token
    generation: Token
    sampler: Count
    number: Token


class Capture(NamedTuple):
    """An observer asks for what the server keeps beside the ring, all of one moment. Answered by CAPTURED, or REFUSED without a ring."""

    session: Token
    generation: Token
    number: Token


class Captured(NamedTuple):
    """The window [tail, committed) of one moment and the server's state of the same: sums, flow control, seed, options.

    ``moments``: packed as in Publish, one entry for each name in ``state["moments"]``. They fit this message as they fit a publish.
    """

    session: Token
    generation: Token
    number: Token
    tail: Count
    committed: Count
    state: Wire
    moments: list[Bytes]


class Explain(NamedTuple):
    """What is this client waiting for? ``what``: ring, credit or sample; ``number`` and ``sampler`` name a request."""

    session: Token
    generation: Token
    what: Literal["ring", "credit", "sample"]
    sampler: Count
    number: Count


class Reason(NamedTuple):
    session: Token
    generation: Token
    what: Literal["ring", "credit", "sample"]
    text: Text


class Refused(NamedTuple):
    """A request can't be met. ``about``: the refused message's class name; ``sampler`` and ``number``: the request's, where it has them."""

    session: Count
    generation: Token
    about: Name
    sampler: Count
    number: Count
    code: Name
    message: Text
    details: Details


class MailPost(NamedTuple):
    """A learner asks for a segment to write a new version of mailbox ``name`` into; ``manifest`` places the arrays."""

    session: Token
    generation: Token
    number: Token
    name: Name
    n_bytes: Count
    manifest: Wire


class MailSlot(NamedTuple):
    session: Token
    generation: Token
    number: Token
    segment: Name
    n_bytes: Count


class MailWritten(NamedTuple):
    """The arrays are in the segment: make it the newest version. Answered by DONE with the version."""

    session: Token
    generation: Token
    number: Token


class MailAsk(NamedTuple):
    """A client asks for mailbox ``name`` if it has a version after ``newer_than``, and for MAIL_NEWS from now on."""

    session: Token
    generation: Token
    name: Name
    newer_than: Count


class MailLent(NamedTuple):
    """The newest version, or version 0 and an empty segment name when there is none after the one asked for."""

    session: Token
    generation: Token
    name: Name
    version: Count
    segment: Name
    n_bytes: Count
    manifest: Wire


class MailReturn(NamedTuple):
    session: Token
    generation: Token
    name: Name
    version: Token


class MailNews(NamedTuple):
    session: Token
    generation: Token
    name: Name
    version: Token


class Admin(NamedTuple):
    """An operator's verb: ``stop``; ``set`` with a key and a value; ``trace-start``; ``trace-stop``, whose value is how many seconds the
    clients may take. Answered by DONE or REFUSED, ``trace-stop`` by a TRACE_PART for each process before that."""

    session: Token
    generation: Token
    number: Token
    verb: Literal["stop", "set", "trace-start", "trace-stop"]
    key: Name
    value: Text


class Done(NamedTuple):
    session: Token
    generation: Token
    number: Token
    result: Count


class TraceOn(NamedTuple):
    """Record at once, also ahead of WELCOME, and keep the newest ``max_spans``. ``part``: the file of the run directory to hand in."""

    session: Token
    generation: Token
    number: Token
    max_spans: Token
    part: Text


class TraceOff(NamedTuple):
    """Record no more, write the part and say TRACED."""

    session: Token
    generation: Token
    number: Token


class Traced(NamedTuple):
    """The part is written, or ``error`` says why not. Sent at TRACE_OFF, and before BYE while a trace is on."""

    session: Token
    generation: Token
    number: Token
    spans: Count
    dropped: Count
    error: Text


class TracePart(NamedTuple):
    """For the operator: ``part`` is the file of one process in the run directory; empty where ``left_out`` says why there is none."""

    session: Token
    generation: Token
    number: Token
    process: Text
    pid: Count
    part: Text
    left_out: Text


class Ping(NamedTuple):
    """Asks nothing: that it can be sent shows that the connection stands."""

    session: Token
    generation: Token


class Stale(NamedTuple):
    """A message of another session or generation came: attach again."""

    session: Count
    generation: Token


class Closing(NamedTuple):
    """The server stops: detach within ``grace_ns``."""

    session: Token
    generation: Token
    grace_ns: Count


class Bye(NamedTuple):
    session: Token
    generation: Token


ClientMessage = (
    Hello
    | Mapped
    | Publish
    | Proof
    | Sample
    | Release
    | Cancel
    | Explain
    | MailPost
    | MailWritten
    | MailAsk
    | MailReturn
    | Admin
    | Bye
    | Unused
    | Traced
    | Observe
    | Capture
)
ServerMessage = (
    Welcome
    | SegmentLent
    | Credit
    | RingAt
    | Challenge
    | Proved
    | Grant
    | Reason
    | Refused
    | MailSlot
    | MailLent
    | MailNews
    | Done
    | Ping
    | Stale
    | Closing
    | TraceOn
    | TraceOff
    | TracePart
    | Captured
)
