"""The collector: writes rows into lent slots, publishes them, and goes on when the server comes back.

No thread: whatever has to happen happens inside a call. A part-filled slot is published by ``flush``, ``close``, ``slot``, by any
call that is about to wait, and by the first ``write`` after ``linger`` seconds; a collector that may pause calls ``flush``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from replay_server_protocol.endpoints import Endpoints, check_name
from replay_server_protocol.errors import InvalidRequest, ReplayError, ReplayTimeout, SchemaMismatch, ServerClosing, ServerGone, shown
from replay_server_protocol.schema import Schema
from replay_server_protocol.trace import CALLING_THREAD, Trace

from replay_server_client.collector_statistics import CollectorStatistics
from replay_server_client.connection import Connection
from replay_server_client.deadline import Deadline
from replay_server_client.ingress import CollectorHello, Ingress
from replay_server_client.mailbox import Mail
from replay_server_client.rows import RowReader, on_gpu
from replay_server_client.slot_writer import LentSlot, SlotWriter
from replay_server_client.slots import LentSlots

if TYPE_CHECKING:
    from replay_server_client.device_rows import DeviceReader

log = logging.getLogger("replay_server_client")

_CLOSE_WAIT_S = 5.0
_NEXT_SERVER_WAIT_S = 20.0
_MOST_LANES = 2**20


class Collector:
    """A session that writes rows. One thread uses it; made by ``connect``, closed by ``close`` or the ``with`` block.

    Every call raises ForkedClient in a forked child and InvalidRequest after ``close``.
    """

    def __init__(self, ingress: Ingress, schema: Schema, lanes: int, name: str, timeout: float | None, linger: float) -> None:
        self.name = name
        self.lanes = lanes
        self.schema = schema
        self._ingress = ingress
        self._reader = RowReader(schema, lanes, ingress.policy)
        self._device_reader: DeviceReader | None = None
        self._timeout = timeout
        self._linger = linger
        self._is_lending = False
        self._pid = os.getpid()
        self._says_bye = weakref.finalize(self, _leave, ingress, f"collector {name}", self._pid)

    @classmethod
    def connect(
        cls,
        server: str | None = None,
        *,
        schema: Schema,
        lanes: int = 1,
        name: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        timeout: float | None = 10.0,
        counted: bool = True,
        linger: float = 0.1,
        run_id: str | None = None,
        trace: Trace | None = None,
        require_zero_copy: bool = False,
    ) -> Self:
        """Attaches to ``server`` (default: $REPLAY_SERVER_NAME, else "default") and maps this collector's slots.

        ``lanes`` environments are interleaved in every ``write``. ``timeout`` is also the default of later waits; ``counted=False``
        keeps the rows out of samples-per-insert; ``trace`` records writes, waits for credit and publishes. With ``require_zero_copy``
        slots that are not read in place, since they can't be pinned or lie on another node, are refused by AttachRefused. Waits for a
        server; raises ServerGone if none came, ReplayTimeout if its ring did not, and what the server refused: SchemaMismatch,
        BudgetExceeded, AttachRefused.
        """
        if not isinstance(schema, Schema):
            raise SchemaMismatch(f"schema={shown(schema)}: make one with Schema.of(...)")
        if isinstance(lanes, bool) or not isinstance(lanes, int) or not 1 <= lanes <= _MOST_LANES:
            raise InvalidRequest(f"lanes={shown(lanes)}: the number of environments in a step, 1 to {_MOST_LANES:,}")
        if not isinstance(counted, bool):
            raise InvalidRequest(f"counted={shown(counted)}: True or False")
        if not isinstance(require_zero_copy, bool):
            raise InvalidRequest(f"require_zero_copy={shown(require_zero_copy)}: True or False")
        if run_id is not None:
            check_name(run_id, "run_id")
        if not (isinstance(linger, Real) and linger >= 0):
            raise InvalidRequest(f"linger={shown(linger)}: seconds, at least 0")
        if trace is not None and not isinstance(trace, Trace):
            raise InvalidRequest(f"trace={shown(trace)}: a Trace, or None")
        deadline = Deadline(timeout)
        own_name = check_name(f"collector-{os.getpid()}" if name is None else name, "collector name")
        hello = CollectorHello(own_name, schema, lanes, counted, run_id)
        connection = Connection(Endpoints.resolve(server, run_dir), hello, trace, f"collector {own_name}")
        try:
            ingress = Ingress(connection, hello, require_zero_copy=require_zero_copy)
            ingress.attach(deadline)
            return cls(ingress, schema, lanes, own_name, timeout, linger)
        except BaseException:
            connection.close()
            raise

    def write(
        self,
        rows: Mapping[str, object],
        *,
        mask: object = None,
        final_mask: object = None,
        final: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Takes rows: a mapping (nested ones are flattened with dots) of arrays ``[n, …]``, time-major over all lanes.

        Only rows where ``mask`` (bool[n]) are kept. Where ``final_mask``, the fields of ``final`` (full length) stand in for those of
        ``rows``: an episode's last next observation. Where a field is a CUDA tensor the rows are packed on its GPU, on the caller's current
        stream, and this call waits for no work of the GPU (but the first one sets up): a full slot is published by the first call that
        finds its copy done, so ``flush`` before a pause. Waits for credits for ``timeout`` seconds (default: that of ``connect``) and
        raises ReplayTimeout, whose ``rows_written`` leading rows were taken; the rest may be written again. Raises RowsRejected with
        nothing written. When the server is lost it attaches to the next one and goes on: what was in flight, also of this call, is counted
        as lost; where the server passed rows on to another node, it is kept and goes to the next one first. Raises ServerGone when no other
        came in time, ServerClosing when the server stops in good order, and what the next one refuses: all with ``rows_written``.
        """
        try:
            self._write(rows, mask, final_mask, final, Deadline(self._timeout if timeout is None else timeout))
        except ReplayError:
            raise
        except BaseException:  # Ctrl-C, a signal handler's: how much was taken nobody knows, and the next row need not be the next step
            self._ingress.chains.cut_all()
            raise

    def cut(self, lanes: object) -> None:
        """Ends these lanes' chains here without an episode end: a number, a sequence of numbers, or bool[lanes]."""
        chains = self._usable().chains
        count = self.lanes
        try:
            chosen = np.atleast_1d(np.asarray(lanes))
        except (ValueError, TypeError, RuntimeError):  # ragged, or an array's own refusal
            chosen = np.atleast_1d(np.empty(1, np.object_))
        if chosen.dtype == np.bool_ and chosen.shape == (count,):
            chosen = np.flatnonzero(chosen)
        if chosen.size == 0:
            return
        if chosen.dtype.kind not in "iu" or chosen.ndim != 1 or chosen.min() < 0 or chosen.max() >= count:
            raise InvalidRequest(f"cut({shown(lanes)}): lanes are numbers from 0 to {count - 1}, or bool[{count}]")
        chains.cut(chosen)

    def flush(self, timeout: float | None = 5.0) -> int:
        """Publishes what is open, waits until all rows written so far are committed, and returns a seq that covers them.

        Raises ReplayTimeout naming what it waits on. After a loss of the server that cost rows it raises ServerGone once, with their
        number (``rows_lost``); later flushes work on the new ring, whose seqs start anew. A loss of one that passes rows on costs none:
        it goes on with the next one, and raises ServerGone if none came in time.
        """
        ingress = self._usable()
        deadline = Deadline(timeout)
        if ingress.slots is None and not ingress.can_resume:
            ingress.tell_loss()
        while True:
            try:
                committed = self._flush(ingress, deadline)
            except ServerGone as gone:
                ingress.lose()
                if ingress.can_resume and not isinstance(gone, ServerClosing) and not deadline.has_passed:
                    continue
                ingress.tell_loss(type(gone))
                raise
            ingress.tell_loss()
            return committed

    @contextlib.contextmanager
    def slot(self, timeout: float | None = 1.0) -> Iterator[LentSlot]:
        """Lends a free slot, to be filled in place and published at the end of the block; an exception inside publishes nothing.

        Waits for a credit; raises ReplayTimeout. Raises RowsRejected at the end if ``slot.rows`` was never set.
        """
        ingress = self._usable()
        slots, writer = self._empty_writer(ingress, Deadline(timeout))
        lent = LentSlot(writer, slots.slot_rows // self.lanes * self.lanes, self.lanes)
        self._is_lending = True
        try:
            yield lent
            ingress.connection.check_process()
            lent.stamp(ingress.policy.version)
            slots.claim(lent.checked_rows())
            with ingress.outliving_server(Deadline(None)):  # as for a write, whose rows are told by flush if they are lost
                slots.publish()
        finally:
            self._is_lending = False
            lent.end()
            slots.abandon()  # what was not published

    def latest(self, mailbox: str, newer_than: int = 0, timeout: float | None = None) -> Mail | None:
        """The newest version of a mailbox after ``newer_than``: (version, arrays by name, copied), or None.

        Asks the server the first time and when it has told of a newer version; otherwise it costs no round trip. So a version is seen
        once its news has arrived, which may be a moment after the post returned. Waits for ``timeout``
        seconds at most (default: that of ``connect``); raises ReplayTimeout. Versions handed out before a server was lost are older
        than all of its successor's.
        """
        ingress = self._usable()
        check_name(mailbox, "mailbox name")
        if isinstance(newer_than, bool) or not isinstance(newer_than, int) or newer_than < 0:
            raise InvalidRequest(f"newer_than={shown(newer_than)}: a version, or 0 for any")
        deadline = Deadline(self._timeout if timeout is None else timeout)
        mail = ingress.mail
        while True:
            with ingress.outliving_server(deadline):
                if ingress.slots is None:
                    ingress.attach(deadline)
                ingress.absorb()
                if not mail.has_news(mailbox, newer_than):
                    return None
                mail.ask(mailbox, newer_than)
                try:
                    ingress.wait(lambda: mail.has_answer, deadline, f"no answer about mailbox {mailbox!r}")
                finally:
                    mail.give_up()
                taken = mail.take(mailbox)
                if taken is not None:
                    ingress.policy.took(mailbox, taken[0])
                return taken

    @property
    def policy_version(self) -> int:
        """What rows are stamped with that carry no policy version: that of the mailbox value ``latest`` handed out last, or one set here.

        0 before the first, and again after a server was lost whose mailbox it came from. Only where the schema has the role.
        """
        return self._ingress.policy.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._usable().policy.give(version)

    def span(self, name: str, **args: int | float | str) -> AbstractContextManager[None]:
        """Records the block as a span while a trace is on (``replay-server trace start``, or this collector's own), else does nothing."""
        trace = self._ingress.connection.trace
        return contextlib.nullcontext() if trace is None else trace.span(name, **args)

    def statistics(self) -> CollectorStatistics:
        """What was done so far and what is held now; sends nothing."""
        self._ingress.connection.check_process()
        return CollectorStatistics.of(self.name, self._ingress)

    def close(self) -> None:
        """Publishes what is open, waits up to 5 s for its credits, says bye and lets go of the slots. Safe to call twice.

        Where a server that passes rows on was lost with some of them, it waits up to 20 s more for the next one.
        Is closed also when it raises: ReplayTimeout, with the numbers of rows that may still be committed (``rows_in_flight``) and that are
        lost (``rows_lost``); ServerGone (rows were lost). Rows that it leaves with neither, and errors that a ``with`` block's own hides,
        are told in the log. But it stays as it is, and raises InvalidRequest, while another thread waits in it. In a forked child it does
        nothing.
        """
        if not self._says_bye.alive or os.getpid() != self._pid:
            return
        ingress, who = self._ingress, f"collector {self.name}"
        ingress.connection.check_caller()
        late: ReplayTimeout | None = None
        try:
            if self._is_lending:
                with ingress.outliving_server(Deadline(None)):
                    ingress.absorb()
            elif ingress.slots is not None or ingress.rows_kept:
                self._flush_last(ingress)
        except ReplayTimeout as error:
            late = error
        except ServerGone as gone:
            ingress.give_up()
            ingress.tell_loss(type(gone))
            if gone.details.get("rows_lost"):
                raise
        finally:
            left = ingress.let_go()
            if left.rows and late is None:
                left.tell(who, "close it after the block of slot()" if self._is_lending else "flush() before close() tells of each loss")
            self._says_bye()
        if late is not None:
            raise left.late(who, late) if left.rows else late

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except ReplayError as hidden:  # the block's own error is the one to raise
            log.warning("closing collector %s: %s", self.name, hidden)

    def _write(
        self, rows: Mapping[str, object], mask: object, final_mask: object, final: Mapping[str, object] | None, deadline: Deadline
    ) -> None:
        ingress = self._usable()
        trace = ingress.connection.trace
        begin_ns = trace.now_ns() if trace is not None else 0
        gpu_tensor = on_gpu(rows)
        reader = self._reader.read if gpu_tensor is None else self._gpu_reader(gpu_tensor).read_device
        block = reader(rows, mask, final_mask, final)
        taken = 0
        try:
            while taken < block.rows:
                with ingress.outliving_server(deadline):
                    slots, writer = ingress.open_writer(deadline, block.device)
                    taken += slots.place(block, taken)
                    if writer.is_full or taken < block.rows or slots.open_for_s >= self._linger:
                        slots.publish()
        except ReplayError as error:  # also the next server's refusal
            ingress.chains.cut_all()
            error.details["rows_written"] = taken
            raise
        if trace is not None:
            trace.record(CALLING_THREAD, "write", begin_ns, trace.now_ns(), rows=taken)

    def _flush_last(self, ingress: Ingress) -> None:
        try:
            self.flush(_CLOSE_WAIT_S)
        except ServerClosing:
            raise
        except ServerGone:
            if not ingress.rows_kept:
                raise
            self.flush(_NEXT_SERVER_WAIT_S)

    def _flush(self, ingress: Ingress, deadline: Deadline) -> int:
        slots = ingress.slots or ingress.attach(deadline)
        slots.publish()
        ingress.wait(lambda: slots.unanswered == 0, deadline, "published rows are not committed", "credit")
        return slots.committed

    def _usable(self) -> Ingress:
        self._ingress.connection.check_caller()
        if not self._says_bye.alive:
            raise InvalidRequest(f"collector {self.name!r} is closed; connect again")
        if self._is_lending:
            raise InvalidRequest(f"collector {self.name!r} has lent a slot; leave its with block first, rows would change order")
        return self._ingress

    def _empty_writer(self, ingress: Ingress, deadline: Deadline) -> tuple[LentSlots, SlotWriter]:
        while True:
            with ingress.outliving_server(deadline):
                if ingress.slots is not None:
                    ingress.slots.publish()
                slots, writer = ingress.open_writer(deadline)
                assert writer.device is None  # as asked for
                return slots, writer

    def _gpu_reader(self, tensor: object) -> DeviceReader:
        """Loads torch's side of the collector, which whoever gave the tensor has imported, and stays with that tensor's GPU."""
        if self._device_reader is None:
            from replay_server_client.device_rows import CudaDevice, DeviceReader

            self._device_reader = DeviceReader(self.schema, self.lanes, CudaDevice(tensor.device), self._ingress.policy)  # type: ignore[attr-defined]
        return self._device_reader


def _leave(ingress: Ingress, who: str, pid: int) -> None:
    """The end of a collector's session. One that is dropped, or that its process leaves at exit, loses what it has not published."""
    if os.getpid() == pid and ingress.left.lost:
        ingress.left.tell(who, "it was never closed: use it in a with block, or close() it")
    ingress.connection.close()
