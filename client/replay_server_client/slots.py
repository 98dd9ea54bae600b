"""The slots the server lent to one session: which are free, open, sealed or published. Never waits.

A slot is written again only after its credit, since only a credit makes it free. Sealed slots are full and handed over in order, each
once its bytes are in it: at once if the host wrote them, later if a GPU copies them there. What an earlier session left goes first: no
slot is free for new rows before all of it is published again.

Ctrl-C, and whatever else a signal handler raises, may end a call anywhere. So each step works its outcome out first and then takes it over
in plain assignments, between which CPython looks for no signal: no slot, row or publish is ever between two places.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import Credit, Publish, SegmentLent
from replay_server_protocol.schema import Schema
from replay_server_protocol.states import SLOT, SlotEvent, SlotState, move
from replay_server_protocol.trace import CALLING_THREAD

from replay_server_client.connection import Connection
from replay_server_client.policy_version import PolicyVersion
from replay_server_client.publishes import Publishes
from replay_server_client.remains import KeptPublish, Remains
from replay_server_client.rows import RowBlock
from replay_server_client.slot_memory import SlotMemory
from replay_server_client.slot_plan import LaneChains, SlotPlan
from replay_server_client.slot_writer import SlotWriter

if TYPE_CHECKING:
    from replay_server_client.device_rows import Device, DeviceBlock, DeviceSlot


@dataclass(slots=True)
class Counts:
    """What a collector has done with rows that are no longer in flight, over all its sessions."""

    rows_committed: int = 0
    rows_masked: int = 0
    rows_rejected: int = 0
    rows_nonfinite: int = 0
    rows_lost: int = 0
    publishes: int = 0
    publishes_resumed: int = 0
    repeats: int = 0
    waited_s: float = 0.0


class LentSlots:
    """One session's segment. ``writer`` is the open slot, if there is one."""

    def __init__(
        self,
        connection: Connection,
        lent: SegmentLent,
        schema: Schema,
        chains: LaneChains,
        counts: Counts,
        policy: PolicyVersion,
        remains: Remains | None = None,
    ) -> None:
        """Maps the segment. ``remains`` fit it, and are what the session goes on from; None where it can't be resumed.

        Raises ProtocolViolation if it can't be what was lent.
        """
        if lent.depth < 1 or lent.slot_rows < chains.lanes or lent.slot_rows * schema.stride > lent.slot_bytes:
            raise ProtocolViolation(
                f"the server lent {lent.depth} slots of {lent.slot_rows} rows in {lent.slot_bytes} bytes, which can't hold a step of "
                f"{chains.lanes} lanes and {schema.stride} bytes a row"
            )
        self.depth = lent.depth
        self.slot_rows = lent.slot_rows
        self.writer: SlotWriter | DeviceSlot | None = None
        self._lent = lent
        self._masked = remains.masked if remains else 0  # rows left out by a mask since the last publish
        self._policy = policy
        self._connection = connection
        self._counts = counts
        plan = SlotPlan(schema, chains, lent, remains.sums if remains else None)
        self._sums = plan.sums
        self._memory = SlotMemory(connection, lent, plan)
        self._sealed: deque[SlotWriter | DeviceSlot] = deque()
        self._states = [SlotState.FREE] * lent.depth
        self._publishes = Publishes.of(lent, remains, time.monotonic())
        self._opened_at = 0.0

    @property
    def has_free(self) -> bool:
        return SlotState.FREE in self._states

    @property
    def free_slots(self) -> int:
        return self._states.count(SlotState.FREE)

    @property
    def unsettled(self) -> int:
        """Sealed slots that are not handed over."""
        return len(self._sealed)

    @property
    def unanswered(self) -> int:
        """Publishes without a credit: also those that will be made, or made again, without another word."""
        return len(self._publishes.unanswered) + len(self._sealed) + self.kept

    @property
    def kept(self) -> int:
        """Publishes of an earlier session that are not made again yet, for want of a free slot."""
        return len(self._publishes.kept)

    @property
    def committed(self) -> int:
        """The newest credit's seq."""
        return self._publishes.committed

    @property
    def rows_in_flight(self) -> int:
        """Rows written and not credited: published ones and those of sealed and open slots.

        Rows from a GPU are among them until their mask is seen, which is when their slot is handed over.
        """
        return self.rows_unpublished + self._publishes.unanswered_rows

    @property
    def rows_unpublished(self) -> int:
        """Those in flight of which no publish has told this session's server."""
        unpublished = sum(writer.rows for writer in self._sealed) + (self.writer.rows if self.writer else 0)
        return unpublished + self._publishes.kept_rows

    @property
    def uncredited_for_s(self) -> float:
        """Since the last credit, or since the publish after which there was one missing; 0 if none is."""
        return time.monotonic() - self._publishes.quiet_since_s if self._publishes.unanswered else 0.0

    @property
    def open_for_s(self) -> float:
        """How long ago the open slot was opened; 0 without one that has rows."""
        return time.monotonic() - self._opened_at if self.writer and self.writer.rows else 0.0

    def open(self, device: Device | None = None) -> SlotWriter | DeviceSlot:
        """Opens a free slot for rows of the host, or of ``device``; only when ``has_free``, and for the host when nothing is unsettled:
        it keeps account of lanes as it writes."""
        index = self._states.index(SlotState.FREE)
        writer = self._memory.writer(index, device)
        state, now_s = move(SLOT, self._states[index], SlotEvent.OPEN), time.monotonic()
        writer.reset()
        self._states[index] = state
        self.writer, self._opened_at = writer, now_s
        return writer

    def place(self, block: RowBlock | DeviceBlock, start: int) -> int:
        """Places what fits of ``block``, from its row ``start`` on, in the open slot. Returns how many of the block's rows were taken."""
        writer = self._open_writer()
        before = writer.rows
        taken = writer.place(block, start)  # type: ignore[arg-type]  # open() was told where the block lies
        kept = writer.rows - before
        self._masked += taken - kept
        self._counts.rows_masked += taken - kept
        return taken

    def claim(self, rows: int) -> None:
        """Counts the first ``rows`` rows of the open, empty slot, which the caller wrote in place."""
        writer = self._open_writer()
        assert writer.device is None  # slot() lends no others
        writer.claim(rows)

    def abandon(self) -> None:
        """Frees the open slot with nothing published."""
        if self.writer is not None:
            index = self.writer.index
            state = move(SLOT, self._states[index], SlotEvent.ABANDON)
            self._states[index] = state
            self.writer = None

    def publish(self) -> None:
        """Seals the open slot, if there is one with rows in it, and hands over what is settled."""
        if self.writer is not None and self.writer.rows:
            self._seal(self.writer)
        self.settle()

    def _seal(self, writer: SlotWriter | DeviceSlot) -> None:
        writer.seal()
        sealed = deque((*self._sealed, writer))
        self._sealed, self.writer = sealed, None

    def settle(self) -> None:
        """Hands over sealed slots in order, up to the first whose bytes are not in it. Raises DeviceError."""
        while self._sealed and self._sealed[0].is_settled:
            trace = self._connection.trace
            begin_ns = trace.now_ns() if trace is not None else 0
            message = self._hand_over(self._sealed[0])
            if message is None:
                continue
            self._connection.send(message)
            if trace is not None:
                trace.record(CALLING_THREAD, "publish", begin_ns, trace.now_ns(), number=message.number, rows=message.rows)

    def _hand_over(self, writer: SlotWriter | DeviceSlot) -> Publish | None:
        """What to say of the rows left in the first sealed slot; of one without any only to tell of rejected rows, else it is freed.

        Its bytes are written by then; the message orders them.
        """
        counts, placed = self._counts, writer.rows
        filled = writer.finish()
        left_out = placed - filled.rows - filled.rejected  # a DeviceSlot's: a SlotWriter places none
        masked, publishes, sealed = self._masked + left_out, self._publishes, deque(tuple(self._sealed)[1:])
        is_told = filled.rows > 0 or filled.rejected > 0
        if is_told:
            masked, publishes = 0, publishes.with_publish(writer.index, filled, masked, self._policy.mailbox, time.monotonic())
        state = move(SLOT, self._states[writer.index], SlotEvent.PUBLISH if is_told else SlotEvent.ABANDON)
        counts.rows_masked += left_out
        counts.rows_rejected += filled.rejected
        counts.rows_nonfinite += filled.nonfinite
        counts.publishes += is_told
        self._states[writer.index] = state
        self._sealed, self._publishes, self._masked = sealed, publishes, masked
        return publishes.newest if is_told else None

    def credit(self, credit: Credit) -> None:
        """Frees the slots of every publish up to the credit's number. An old number again changes nothing."""
        before = self._publishes
        publishes = before.with_credit(credit, time.monotonic())
        states, rows = list(self._states), 0
        for publish in publishes.answered_since(before):
            states[publish.slot] = move(SLOT, states[publish.slot], SlotEvent.CREDIT)
            rows += publish.rows
        self._states, self._publishes = states, publishes
        self._counts.rows_committed += rows

    def repeat(self) -> None:
        """Sends every unanswered publish again, if a second has passed in silence; the server takes none twice."""
        now_s = time.monotonic()
        if not self._publishes.is_to_repeat(now_s):
            return
        self._publishes = self._publishes.with_repeat(now_s)
        self._counts.repeats += 1
        for publish in self._publishes.unanswered:
            self._connection.send(publish)

    def publish_again(self) -> None:
        """Copies what an earlier session left into the slots that are free, and publishes it."""
        while self.kept and self.has_free:
            index = self._states.index(SlotState.FREE)
            self._memory.copy_in(index, self._publishes.kept[0].rows)
            publishes = self._publishes.with_kept(index, time.monotonic())
            state = move(SLOT, move(SLOT, self._states[index], SlotEvent.OPEN), SlotEvent.PUBLISH)
            self._states[index] = state
            self._publishes = publishes
            self._counts.publishes_resumed += 1
            self._connection.send(publishes.newest)

    def retire(self) -> Remains | None:
        """The session is lost: hands over what is written, without a word, and returns what the next one goes on from.

        None if it can't be resumed. Waits for what a GPU has still to copy, and raises DeviceError. ``close`` it after that.
        """
        if not self._publishes.origin:
            return None
        if self.writer is not None and not self.writer.rows:
            self.abandon()
        if self.writer is not None:
            self._seal(self.writer)
        self._memory.wait_for_copies()
        while self._sealed and self._sealed[0].is_settled:
            self._hand_over(self._sealed[0])
        self._memory.take_cuts()
        publishes = self._publishes
        kept = (KeptPublish(publish, self._memory.rows(publish.slot, publish.rows)) for publish in publishes.unanswered)
        return Remains(
            publishes.origin,
            publishes.credited,
            (*kept, *publishes.kept),
            publishes.committed,
            self._masked,
            publishes.placed,
            self._sums,
            self._lent,
        )

    def close(self) -> None:
        """Lets go of the segment, with whatever is in flight."""
        self.writer = None
        self._sealed.clear()
        self._memory.close()

    def _open_writer(self) -> SlotWriter | DeviceSlot:
        if self.writer is None:
            raise ProtocolViolation("no slot is open")
        return self.writer
