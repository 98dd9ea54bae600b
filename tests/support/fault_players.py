"""The clients of a fault schedule: real collectors and learners that work until they are told to finish, and judge all they see.

Each shares one ``Page`` with the stage. A player raises what it finds wrong; what may happen to a client whose server restarts, or who
was stopped for longer than a lease, it takes as its documentation says.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import mmap
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from replay_server_client import Collector, ForkedClient, Learner, ReplayTimeout, ServerClosing, ServerGone
from replay_server_client.collector_statistics import CollectorStatistics
from replay_server_client.connection import Connection
from replay_server_client.slots import LentSlots
from replay_server_protocol.messages import Publish
from support.fault_schedules import CollectorPart, LearnerPart
from support.leaks import _descriptors, _threads
from support.numbered_rows import NUMBERED, Numbering, broken

CALL_S = 12.0
"""Time of every call: longer than whatever a schedule does to the server."""
_NAP_S = 0.002
_SEQS_TOLD = 300


class Phase(IntEnum):
    WORK = 0
    FINISH = 1  # collectors flush, learners take one more batch of what is committed by then
    LEAVE = 2


class Cell(IntEnum):
    """Numbers on a page; those of rows are about the present generation."""

    PHASE = 0
    READY = 1
    REACHED = 2  # the point
    ORDER = 3  # 0, or 1 + the place of a fault that the player does to itself
    OBEYED = 4
    IDLE = 5
    GENERATION = 6
    SENT_ROWS = 7
    CREDITED_ROWS = 8
    WENT_ON_NS = 9  # when the first call in this generation succeeded
    FINAL_SEQ = 10
    CHILD = 11


class Page:
    """A few numbers shared with the stage."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._cells = np.frombuffer(self._memory, np.int64, len(Cell))

    def __getitem__(self, cell: Cell) -> int:
        return int(self._cells[cell])

    def __setitem__(self, cell: Cell, value: int) -> None:
        self._cells[cell] = value


@dataclass(slots=True)
class Told:
    """What a player says at its end. ``waits``: (call, began, lasted) in seconds of the monotonic clock."""

    waits: list[tuple[str, float, float]] = field(default_factory=list)
    late: int = 0
    rows: int = 0
    rows_written: int = 0
    rows_committed: int = 0
    rows_lost: int = 0
    seqs: dict[int, tuple[int, int]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


class Player:
    """What both kinds share: orders, waits, and the account of what is left after the end."""

    def __init__(self, page: Page, where: tuple[str, str], faults: tuple[str, ...], seed: int) -> None:
        self.page = page
        self.told = Told()
        self._server, self._run_dir = where
        self._orders = faults
        self._rng = random.Random(seed)
        self._generation = 0

    def timed(self, call: str, action: Callable[..., Any], *arguments: Any) -> Any:
        began_s = time.monotonic()
        try:
            return action(*arguments)
        finally:
            self.told.waits.append((call, began_s, time.monotonic() - began_s))

    def connected(self, connect: Callable[[], Any]) -> Any:
        """A client, made as soon as no server is closing."""
        while True:
            try:
                client = self.timed("connect", connect)
            except ServerClosing:
                time.sleep(_NAP_S)
            else:
                self.page[Cell.READY] = 1
                return client

    def went_on(self, generation: int) -> None:
        """A call has succeeded in this generation."""
        if generation != self._generation:
            self._generation = generation
            self.page[Cell.WENT_ON_NS] = time.monotonic_ns()

    def take_order(self) -> str | None:
        place = self.page[Cell.ORDER]
        if place == self.page[Cell.OBEYED]:
            return None
        self.page[Cell.OBEYED] = place
        return self._orders[place - 1]

    def works(self) -> bool:
        return self.page[Cell.PHASE] == Phase.WORK

    def idle(self) -> None:
        self.page[Cell.IDLE] = 1
        while self.page[Cell.PHASE] != Phase.LEAVE:
            time.sleep(_NAP_S)  # another process's memory is no event

    def fork(self, how: str, uses: list[Callable[[], object]], close: Callable[[], None]) -> None:
        """A child with a copy of this client: it uses it, or ends as Python ends, or is killed, or lives on until the stage ends it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which is the point
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = _live_as_child(how, uses, close)
            finally:
                os._exit(code)
        if how == "outlives":
            self.page[Cell.CHILD] = pid
            return
        if how == "killed":
            time.sleep(0.02)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code == (-signal.SIGKILL if how == "killed" else 0), f"the forked child ({how}) ended with {code}"


def _live_as_child(how: str, uses: list[Callable[[], object]], close: Callable[[], None]) -> int:
    if how in ("killed", "outlives"):
        threading.Event().wait(60)
        return 1
    if how == "uses":
        for use in uses:
            try:
                use()
            except ForkedClient:
                continue
            return 2
        close()
    gc.collect()
    atexit._run_exitfuncs()
    return 0


class CollectorPlayer(Player):
    def __init__(self, part: CollectorPart, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._part = part
        self._numbering = Numbering(part.collector, part.lanes, self._rng, part.p_masked)

    def play(self) -> None:
        part, rng = self._part, self._rng
        collector = self._connect()
        while self.works():
            if order := self.take_order():
                collector = self._obey(order, collector)
            self._act(collector)
            time.sleep(part.pause_ms * rng.random() * 2 / 1000)
        self._act(collector)  # a ring that came last has rows then
        while not self._attempt("flush", collector.flush, CALL_S):
            self._act(collector)
        found = collector.statistics()
        assert found.generation is not None
        assert found.rows_in_flight == 0, found
        self.went_on(found.generation)
        self._account(found)
        self.idle()
        collector.close()

    def _act(self, collector: Collector) -> None:
        part, rng = self._part, self._rng
        rows, keep = self._numbering.steps(part.steps)
        if keep is None and rng.random() < part.p_slot:
            self._attempt("slot", self._fill_slot, collector, rows)
        else:
            self._attempt("write", lambda: collector.write(rows, mask=keep))
        if rng.random() < part.p_flush:
            self._attempt("flush", collector.flush, CALL_S)
        if rng.random() < part.p_latest:
            self._attempt("latest", lambda: collector.latest("policy", timeout=CALL_S))
        if self.page[Cell.CREDITED_ROWS]:
            self.went_on(self.page[Cell.GENERATION])

    def _account(self, found: CollectorStatistics) -> None:
        """Of one collector, at its end."""
        accounted = found.rows_committed + found.rows_rejected + found.rows_in_flight + found.rows_lost
        assert found.rows_written == accounted, f"rows written are not committed + rejected + in flight + lost: {found}"
        self.told.rows_written += found.rows_written
        self.told.rows_committed += found.rows_committed
        self.told.rows_lost += found.rows_lost

    def _connect(self) -> Collector:
        part = self._part
        collector: Collector = self.connected(
            lambda: Collector.connect(
                self._server, schema=NUMBERED, lanes=part.lanes, name=part.name, run_dir=self._run_dir, timeout=CALL_S, linger=0.02
            )
        )
        return collector

    def _attempt(self, call: str, action: Callable[..., Any], *arguments: Any) -> bool:
        """False when the server was lost in it: rows may be lost then, and the next call attaches again."""
        try:
            self.timed(call, action, *arguments)
        except ServerClosing:
            time.sleep(_NAP_S)
            return False
        except ServerGone as gone:
            if not gone.details.get("rows_lost"):
                raise
            return False
        return True

    def _fill_slot(self, collector: Collector, rows: dict[str, Any]) -> None:
        n, first = len(rows["lane"]), 0
        while first < n:
            with collector.slot(CALL_S) as slot:
                k = min(slot.max_rows, n - first)
                for name, column in rows.items():
                    slot[name][:k] = column[first : first + k]
                slot.rows = k
            first += k

    def _obey(self, how: str, collector: Collector) -> Collector:
        if how == "close":
            with contextlib.suppress(ServerGone):
                self.timed("close", collector.close)
            self._account(collector.statistics())
            return self._connect()
        rows, keep = Numbering(self._part.collector, self._part.lanes, random.Random(1), 0.0).steps(1)
        uses: list[Callable[[], object]] = [
            lambda: collector.write(rows, mask=keep),
            collector.flush,
            collector.statistics,
            lambda: collector.latest("policy"),
        ]
        self.fork(how, uses, collector.close)
        return collector


class LearnerPlayer(Player):
    def __init__(self, part: LearnerPart, device: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._part = part
        self._device = device
        self._rows: dict[int, tuple[int, int]] = {}
        self._attached = 0

    def play(self) -> None:
        part, rng = self._part, self._rng
        learner = self._connect()
        while self.works():
            if order := self.take_order():
                learner = self._obey(order, learner)
            self._attempt("sample", self._sample, learner)
            if part.drives:
                learner.progress()
            if rng.random() < part.p_post:
                self._attempt("post", learner.post, "policy", {"w": np.zeros(64)}, CALL_S)
            time.sleep(part.pause_ms * rng.random() * 2 / 1000)
        while not (seq := self.page[Cell.FINAL_SEQ]):
            if self.page[Cell.PHASE] == Phase.LEAVE:
                return
            time.sleep(_NAP_S)
        while not self._attempt("sample", self._sample, learner, seq):
            pass
        self.told.rows = learner.statistics().rows
        self.told.late = max(self.told.late, learner.statistics().late)
        self.told.seqs = dict(list(self._rows.items())[-_SEQS_TOLD:])
        self.idle()
        learner.close()

    def _connect(self) -> Learner:
        part = self._part
        learner: Learner = self.connected(
            lambda: Learner.connect(
                self._server, device=self._device, name=part.name, prefetch=part.prefetch, run_dir=self._run_dir, timeout=CALL_S
            )
        )
        self._attached = 0
        return learner

    def _attempt(self, call: str, action: Callable[..., Any], *arguments: Any) -> bool:
        try:
            self.timed(call, action, *arguments)
        except ServerClosing:
            time.sleep(_NAP_S)
            return False
        except ReplayTimeout as late:
            if "gather_ms" not in late.details:
                raise
            self.told.late += 1  # three late ones in a row: this process was stopped, or the machine is busy
            return False
        return True

    def _sample(self, learner: Learner, min_committed: int = 0) -> None:
        part = self._part
        if part.way == "sequences":
            batch = learner.sequences(part.n, length=part.length, burn_in=1, min_committed=min_committed, timeout=CALL_S)
        elif part.way == "n_step":
            batch = learner.sample(part.n, n_step=3, min_committed=min_committed, timeout=CALL_S)
        else:
            batch = learner.sample(part.n, by=part.way, min_committed=min_committed, timeout=CALL_S)
        if learner.statistics().generations != self._attached:
            self._attached = learner.statistics().generations
            self._rows.clear()
            self.page[Cell.WENT_ON_NS] = time.monotonic_ns()
        self._judge(batch)
        if part.way == "priority":
            learner.update_priorities(batch, [self._rng.random() for _ in range(part.n)])

    def _judge(self, batch: Any) -> None:
        fields = {name: tensor.cpu().numpy() for name, tensor in batch.fields.items()}
        seqs = batch.seqs.cpu().numpy()
        tail, committed = batch.window
        steps: Any = 1
        if self._part.way == "n_step":
            steps = batch.n_steps.cpu().numpy()
            fields["terminated"] = fields["step"] % 17 == 16  # of the last row; the marker is about the first
            fields["reward"] = (fields["step"] % 1000).astype(np.float32)
        wrong = broken(fields, steps)
        assert not wrong.any(), f"torn rows: seqs {seqs[wrong]} of window {batch.window}: numbers {fields['number'][wrong]}"
        assert ((seqs >= tail) & (seqs < committed)).all(), f"seqs outside the window {batch.window}: {seqs}"
        if self._part.way == "sequences":
            self._judge_chains(fields, batch.mask.cpu().numpy())
        for seq, collector, number in zip(
            seqs.ravel().tolist(), fields["collector"].ravel().tolist(), fields["number"].ravel().tolist(), strict=True
        ):
            known = self._rows.setdefault(seq, (collector, number))
            assert known == (collector, number), f"seq {seq} was row {known} and is {(collector, number)} in window {batch.window}"

    def _judge_chains(self, fields: dict[str, Any], mask: Any) -> None:
        both = mask[:, 1:]
        for name in ("collector", "lane"):
            same = fields[name][:, 1:] == fields[name][:, :-1]
            assert (same | ~both).all(), f"a chain leads to another {name}"
        steps = np.diff(fields["step"], axis=1)
        assert ((steps == 1) | ~both).all(), f"a chain leads to another step: {fields['step']}, mask {mask}"

    def _obey(self, how: str, learner: Learner) -> Learner:
        if how == "close":
            learner.close()
            return self._connect()
        uses: list[Callable[[], object]] = [
            lambda: learner.sample(4),
            learner.progress,
            learner.statistics,
            lambda: learner.post("policy", {"w": np.zeros(1)}),
        ]
        self.fork(how, uses, learner.close)
        return learner


def note_publishes(page: Page) -> None:
    """Keeps account on the page of the rows this process has sent and was credited in the present generation, whatever becomes of it."""
    send, credit = Connection.send, LentSlots.credit
    seen: set[tuple[int, int]] = set()
    before = [0]

    def noting_send(self: Connection, message: Any) -> None:
        if isinstance(message, Publish) and (message.session, message.number) not in seen:
            seen.add((message.session, message.number))
            if message.generation != page[Cell.GENERATION]:
                page[Cell.SENT_ROWS] = page[Cell.CREDITED_ROWS] = 0
                page[Cell.GENERATION] = message.generation
            page[Cell.SENT_ROWS] += message.rows + message.rejected
        send(self, message)

    def noting_credit(self: LentSlots, message: Any) -> None:
        before[0] = self._counts.rows_committed
        credit(self, message)
        page[Cell.CREDITED_ROWS] += self._counts.rows_committed - before[0]

    Connection.send = noting_send  # type: ignore[method-assign]
    LentSlots.credit = noting_credit  # type: ignore[assignment,method-assign]


def play(player: Player, tell: Path) -> None:
    """Plays, and writes what is to be told as JSON."""
    import json
    from dataclasses import asdict

    before = {*_descriptors(), *_threads()}
    player.play()  # type: ignore[attr-defined]
    gc.collect()
    player.told.left = sorted({*_descriptors(), *_threads()} - before)
    tell.write_text(json.dumps(asdict(player.told)), "utf-8")
