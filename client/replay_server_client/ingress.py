"""The collector's end of ingress: attaches, waits for credits within a deadline, notices a loss and attaches again.

All messages of the session are read here, in one place: a credit frees slots whatever the caller happens to wait for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from replay_server_protocol.errors import AttachRefused, ReplayTimeout, SchemaMismatch, ServerClosing, ServerGone
from replay_server_protocol.messages import Credit, Explain, Hello, Mapped, Reason, Refused, SegmentLent, ServerMessage
from replay_server_protocol.schema import Schema
from replay_server_protocol.trace import CALLING_THREAD

from replay_server_client.connection import Connection, error_of
from replay_server_client.deadline import Deadline
from replay_server_client.hello import hello_of
from replay_server_client.left_rows import LeftRows
from replay_server_client.mailbox import MailReader
from replay_server_client.policy_version import PolicyVersion
from replay_server_client.publishes import REPEAT_S
from replay_server_client.remains import Remains
from replay_server_client.slot_plan import LaneChains
from replay_server_client.slot_writer import SlotWriter
from replay_server_client.slots import Counts, LentSlots

if TYPE_CHECKING:
    from replay_server_client.device_rows import Device, DeviceSlot

_REASON_WAIT_S = 0.015
"""After the deadline, for the server's word on what was missing."""
_LOOK_AT_GPU_S = 50e-6
"""A slot's copy takes from a tenth of a millisecond on."""


@dataclass(slots=True)
class CollectorHello:
    """Makes the HELLO of each attach. Apart from the collector, which its connection must not keep alive."""

    name: str
    schema: Schema
    lanes: int
    counted: bool
    run_id: str | None

    def __call__(self, nonce: int) -> Hello:
        return hello_of("collector", self.name, nonce, run_id=self.run_id, schema=self.schema, lanes=self.lanes, counted=self.counted)


Missing = Literal["ring", "credit", "gpu"]
"""What a wait is for: the first two the server can explain."""
_NOT_IN_PLACE = {"pageable": "raise its limit on locked memory (ulimit -l)", "to another node": "collect on the node of the ring"}
"""How slots are copied that the ring's device doesn't read where they lie, as ``copied_as`` begins, and what to do about it."""


class Ingress:
    """``slots`` are those of the present session, None while there is none; everything else outlives sessions."""

    def __init__(self, connection: Connection, hello: CollectorHello, *, require_zero_copy: bool = False) -> None:
        self.connection = connection
        self.slots: LentSlots | None = None
        self.chains = LaneChains(hello.lanes)
        self.mail = MailReader(connection)
        self.counts = Counts()
        self.policy = PolicyVersion()
        self._hello = hello
        self._require_zero_copy = require_zero_copy
        self._segment: SegmentLent | None = None
        self._reason: Reason | None = None
        self.rows_given_up = 0  # of a closed collector: published, and their credits not waited for
        self._untold_loss = 0  # rows lost that no flush has told of
        self._why_given_up = ""
        self._generation = 0  # of the slots
        self._lost: dict[int, int] = {}  # rows lost by the generation they were handed to, not yet told to a server
        self._remains = Remains.of_nothing()  # of the session before, until there is the next one

    def attach(self, deadline: Deadline) -> LentSlots:
        """Opens a session and maps its slots. Starts over if the server dies meanwhile, until the deadline.

        Raises ServerGone if no server came, ReplayTimeout if its ring did not, and what the server refused.
        """
        while True:
            self._segment = None
            try:
                self.connection.attach(deadline)
                self.wait(lambda: self._segment is not None, deadline, "no slots were lent", "ring")
                return self._map()
            except ServerClosing:
                self.connection.say_bye()
                raise
            except ServerGone:
                if self.slots is not None:  # lost again as what was kept went to it
                    self.lose()
                if deadline.has_passed:
                    raise
            except BaseException:
                self.connection.say_bye()
                raise

    @property
    def can_resume(self) -> bool:
        """There is no session, and the next one goes on from the one that was lost."""
        return self._remains.lent is not None

    @property
    def rows_kept(self) -> int:
        """Rows of sessions that were lost, for the next one."""
        return self._remains.rows

    def open_writer(self, deadline: Deadline, device: Device | None = None) -> tuple[LentSlots, SlotWriter | DeviceSlot]:
        """The open slot, or a free one after waiting for its credit, for rows of the host or of ``device``. Attaches first if there is
        no session."""
        slots = self.slots or self.attach(deadline)
        slots.settle()
        if slots.writer is not None:
            if slots.writer.device is device:
                return slots, slots.writer
            slots.publish()
        if device is None and slots.unsettled:
            self.wait(lambda: slots.unsettled == 0, deadline, "the GPU has not finished the rows before these", "gpu")
        held = f", {slots.unsettled} of them once the GPU has copied their rows" if slots.unsettled else ""
        held += f"; {slots.kept} more from before a server was lost go first" if slots.kept else ""
        self.wait(lambda: slots.has_free, deadline, f"no credit: all {slots.depth} slots are published{held}", "credit")
        return slots, slots.open(device)

    def absorb(self) -> None:
        """Takes in every message that is there; never waits. Raises ServerGone and what the server refused."""
        while (message := self.connection.receive_nowait()) is not None:
            self._accept(message)

    def wait(self, is_done: Callable[[], bool], deadline: Deadline, missing: str, what: Missing | None = None) -> None:
        """Until ``is_done``. Before it really waits, the open slot is published: somebody may be waiting for its rows.

        Raises ReplayTimeout with ``missing``, the time, and the server's own reason for ``what``; ServerGone at once on its death.
        """
        self.absorb()
        if is_done():
            return
        if self.slots is not None:
            self.slots.publish()
        started = time.monotonic()
        try:
            with self.connection.waiting():
                while not deadline.has_passed:
                    if self.slots is not None:
                        self.slots.repeat()
                    self._sleep(min(deadline.remaining_s, REPEAT_S))
                    self.absorb()
                    if what != "gpu" and self.connection.silence.wait(started, self._ask, lambda: self._told_silence(missing, what)):
                        self.absorb()
                    if is_done():
                        return
        finally:
            ended = time.monotonic()
            self.counts.waited_s += ended - started
            trace = self.connection.trace
            if trace is not None and what == "credit":
                trace.record(CALLING_THREAD, "wait for credit", round(started * 1e9), round(ended * 1e9))
        raise ReplayTimeout(f"{missing} after {deadline.elapsed_s:.2f} s{self._credited(what)}; {self._ask_reason(what)}")

    @contextlib.contextmanager
    def outliving_server(self, deadline: Deadline) -> Iterator[None]:
        """Swallows the server's loss inside the block, for the caller to go on with another one; raises it if no time is left or the
        server stops in good order."""
        try:
            yield
        except ServerGone as gone:
            self.lose()
            if isinstance(gone, ServerClosing) or deadline.has_passed:
                raise

    def lose(self) -> None:
        """Lets go of the session. What was in flight is kept for the next one if that may go on with it, else counted as lost."""
        slots = self.slots
        if slots is not None:
            remains = slots.retire()
            lost = {self._generation: slots.rows_in_flight} if remains is None else {}
            self.mail.forget()
            self.policy.forget()
            self._go_on_from(remains, lost)
            slots.close()
        self.connection.say_bye()

    def give_up(self) -> None:
        """Counts as lost what was kept for the next server. A new origin begins: the old one would lack numbers."""
        lost = dict[int, int]()
        for publish in (kept.publish for kept in self._remains.kept):
            lost[publish.generation] = lost.get(publish.generation, 0) + publish.rows
        self._go_on_from(None, lost)

    def _go_on_from(self, remains: Remains | None, lost: Mapping[int, int]) -> None:
        """There are no slots. The next session goes on from ``remains``, or from nothing; ``lost`` rows by generation are counted.

        In one assignment, as in ``slots``: Ctrl-C leaves no row between two places.
        """
        if remains is None:
            self.chains.cut_all()
            remains = Remains.of_nothing()
        all_lost = {generation: self._lost.get(generation, 0) + lost.get(generation, 0) for generation in (*self._lost, *lost)}
        rows, counts = sum(lost.values()), self.counts
        untold, total = self._untold_loss + rows, counts.rows_lost + rows
        self.slots, self._remains, self._lost, self._untold_loss, counts.rows_lost = None, remains, all_lost, untold, total

    def tell_loss(self, kind: type[ServerGone] = ServerGone) -> None:
        """Raises ``kind`` once after a loss that cost rows, with their number."""
        rows, self._untold_loss = self._untold_loss, 0
        why, self._why_given_up = self._why_given_up, ""
        if rows:
            raise kind(
                f"server {self.connection.endpoints.name!r} was lost, and with it {rows} rows that it had not committed; seqs from before "
                f"belong to its old ring, the next flush() is about rows written since{why}",
                rows_lost=rows,
            )

    @property
    def left(self) -> LeftRows:
        """What a collector leaves behind that ends now."""
        slots = self.slots
        if slots is None:
            return LeftRows(0, self.rows_kept, self._untold_loss)
        unpublished = slots.rows_unpublished
        return LeftRows(slots.rows_in_flight - unpublished, unpublished, self._untold_loss, slots.uncredited_for_s)

    def let_go(self) -> LeftRows:
        """Drops the slots for good. What is left of them is counted: as lost what was not published; the rest stays in flight."""
        slots, left, counts = self.slots, self.left, self.counts
        total, in_flight = counts.rows_lost + left.unpublished, self.rows_given_up + left.published
        self.slots, self._remains, self._untold_loss, self.rows_given_up, counts.rows_lost = None, Remains.of_nothing(), 0, in_flight, total
        if slots is not None:
            slots.close()
        return left

    def _sleep(self, timeout_s: float) -> None:
        """Until a message may be there. While a GPU copies rows, whose end wakes nobody, only for a moment."""
        if self.slots is None or not self.slots.unsettled:
            self.connection.sleep(timeout_s)
            return
        time.sleep(min(timeout_s, _LOOK_AT_GPU_S))
        self.slots.settle()

    def _map(self) -> LentSlots:
        lent, connection = self._segment, self.connection
        assert lent is not None  # what attach waited for
        differences = self._hello.schema.differences(Schema.from_wire(lent.schema))
        if differences:
            raise SchemaMismatch(f"the ring of server {connection.endpoints.name!r} has another schema: {differences}")
        if self._require_zero_copy and lent.copied_as.startswith(tuple(_NOT_IN_PLACE)):
            remedy = next(remedy for way, remedy in _NOT_IN_PLACE.items() if lent.copied_as.startswith(way))
            raise AttachRefused(
                f"require_zero_copy: server {connection.endpoints.name!r} copies these slots {lent.copied_as}; {remedy}, or do without "
                "require_zero_copy"
            )
        unfit = self._remains.why_unfit(lent)
        if unfit is not None:
            self._why_given_up = f"; they were kept for its successor, which {unfit}" if self._remains.kept else ""
            self.give_up()
        remains = self._remains if lent.resumes else None
        slots = LentSlots(connection, lent, self._hello.schema, self.chains, self.counts, self.policy, remains)
        self.slots, self._remains = slots, Remains.of_nothing()
        connection.send(Mapped(connection.session, connection.generation, self._rows_to_tell(connection.generation)))
        self._lost.clear()
        slots.publish_again()
        return slots

    def _rows_to_tell(self, generation: int) -> int:
        """Rows lost with earlier generations. Those handed to this one it counts itself: what reached it in time it commits."""
        self._generation = generation
        return sum(rows for lost_with, rows in self._lost.items() if lost_with != generation)

    def _accept(self, message: ServerMessage) -> None:
        match message:
            case Credit():
                if self.slots is not None:
                    self.slots.credit(message)
                    self.slots.publish_again()
            case SegmentLent():
                self._segment = message
            case Reason():
                self._reason = message
            case Refused():
                raise error_of(message)
            case _:
                self.mail.accept(message)

    def _credited(self, what: Missing | None) -> str:
        """Up to where rows are committed, for a wait for credits."""
        return f" (the last credit was for rows up to seq {self.slots.committed:,})" if self.slots is not None and what == "credit" else ""

    def _told_silence(self, missing: str, what: Missing | None) -> str:
        return f"{missing}{self._credited(what)}; {self.connection.why_silent()}"

    def _ask(self, what: Literal["ring", "credit"] = "credit") -> None:
        self._reason = None
        self.connection.send(Explain(self.connection.session, self.connection.generation, what, 0, 0))

    def _ask_reason(self, what: Missing | None) -> str:
        """The server's word on what this client waits for; at most 15 ms past the deadline."""
        if what == "gpu":
            return "other work of this process is queued before its copies: let that end first, or give a longer timeout"
        if what is None:
            return self.connection.why_silent()
        self._ask(what)
        end = time.monotonic() + _REASON_WAIT_S
        while self._reason is None and (left := end - time.monotonic()) > 0:
            self.connection.sleep(left)
            self.absorb()
        name = self.connection.endpoints.name
        return f"server {name!r}: {self._reason.text}" if self._reason else self.connection.why_silent()
