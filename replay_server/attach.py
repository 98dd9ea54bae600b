"""How clients come and go: HELLO to a mapped segment or a ring that is shown, and what is let go of when a session ends."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from replay_server_protocol.errors import (
    AttachRefused,
    BudgetExceeded,
    DeviceError,
    InvalidRequest,
    ReplayError,
    SchemaMismatch,
    ServerClosing,
)
from replay_server_protocol.messages import MAX_TEXT, PROTOCOL_VERSION, Hello, Mapped, Refused, SegmentLent, Welcome
from replay_server_protocol.process import ProcessIdentity, pid_namespace
from replay_server_protocol.schema import Schema
from replay_server_protocol.segment import Segment, align, segment_name
from replay_server_protocol.states import SessionEvent, SessionState

from replay_server.budget import check_slots, free_host_bytes
from replay_server.config import slot_rows_for
from replay_server.credit import Credits
from replay_server.descriptors import check_descriptors
from replay_server.replay import Phase, Replay, Store
from replay_server.saved.manifest import Manifest
from replay_server.sessions import CollectorSession, MappingSession, Session
from replay_server.showing import Showing
from replay_server.snapshot.restoration import Restoration
from replay_server.store import finite_fields, make_store

log = logging.getLogger("replay_server")

_MEMORY_WAIT_S = 30.0
_TELL_EVERY_S = 1.0


class AttachDesk:
    """Opens and ends sessions."""

    def __init__(self, replay: Replay, build_store: Callable[[Replay, Schema, int], Store] = make_store) -> None:
        self._replay = replay
        self._build_store = build_store
        self._namespace = pid_namespace()
        self._me = ProcessIdentity.current()
        self._memory_wait_ends_s: float | None = None
        self._pending_schema: Schema | None = None
        self._tell_refused_at_s = 0.0
        self._untold = 0
        self.showing = Showing(replay, self.refuse)
        self._restoration: Restoration | None = None

    def greet(self, identity: bytes, hello: Hello, now_s: float) -> None:
        """Answers HELLO: a session and what follows for its role, or a typed refusal. A repeated HELLO gets the same answer again."""
        replay = self._replay
        session = replay.sessions.by_nonce(hello.nonce, identity)
        if session is not None:
            self._welcome(session)
            return
        try:
            self._check(hello)
            session = replay.sessions.open(identity, hello, now_s)
        except ReplayError as error:
            self._tell_refused(hello, error, now_s)
            replay.control.send(identity, self.refusal(0, "Hello", error))
            return
        if hello.pid_namespace == self._namespace:
            replay.deaths.watch(session.token, session.process)
        replay.counters.sessions_opened += 1
        replay.tracing.tell(session)  # before the welcome: a client records from its first call on
        self._welcome(session)
        log.info("attached %s", session)
        if isinstance(session, CollectorSession):
            self._serve_collector(session)
        elif isinstance(session, MappingSession):
            self.showing.show(session)
        else:
            session.happen(SessionEvent.MAPPED)

    def _tell_refused(self, hello: Hello, error: ReplayError, now_s: float) -> None:
        """One line a second: who is refused may ask again at once, for ever, and whoever reads the log may be slow."""
        if now_s < self._tell_refused_at_s:
            self._untold += 1
            return
        more = f" (and {self._untold} refusals before that)" if self._untold else ""
        log.info("refused %s %r (pid %d): %s%s", hello.role, hello.name, hello.pid, error, more)
        self._tell_refused_at_s, self._untold = now_s + _TELL_EVERY_S, 0

    def mapped(self, session: CollectorSession, message: Mapped) -> None:
        """The collector has its segment: the name goes, so that nothing is left behind whoever dies."""
        if session.segment is not None and session.state is SessionState.GREETED:
            self._replay.counters.rows_lost += message.rows_lost
            self._replay.counters.rows_published += message.rows_lost  # by the same collector, to a generation that is gone
            session.segment.unlink()
            session.happen(SessionEvent.MAPPED)

    def refuse(self, session: Session, about: str, error: ReplayError) -> None:
        """Ends a session that can't go on, saying why."""
        self._replay.send(session, self.refusal(session.token, about, error))
        self.end(session, str(error), is_lost=True)

    def refusal(self, token: int, about: str, error: ReplayError, sampler: int = 0, number: int = 0) -> Refused:
        """REFUSED with the code, text and details from which the client makes the same error."""
        return Refused(token, self._replay.generation, about, sampler, number, error.code, str(error)[:MAX_TEXT], error.details)

    def end(self, session: Session, why: str, *, is_dead: bool = False, is_lost: bool = False) -> None:
        """Ends a session. Its published slots go on to the ring; its leases end now only if its process is dead."""
        replay = self._replay
        replay.sessions.end(session, time.monotonic())
        replay.deaths.unwatch(session.token)
        replay.requests.forget(session.token)
        replay.mailboxes.forget(session.token)
        replay.tracing.ended(session)
        replay.counters.sessions_lost += is_dead or is_lost
        if is_dead:
            for lease in replay.leases.orphan(session.token):
                replay.flow.refund(lease.counted_rows)
                replay.counters.batches_dropped += lease.rows > 0
        if isinstance(session, CollectorSession):
            self.let_go(session)
        elif isinstance(session, MappingSession):
            self.showing.note_holders()
        log.info("ended %s: %s", session, why)

    def let_go(self, collector: CollectorSession) -> None:
        """Drops the segment of an ended session once nothing in it waits to be copied."""
        segment, store = collector.segment, self._replay.store
        if collector.state is not SessionState.ENDED or segment is None or store is None or collector.queued:
            return
        collector.segment = None
        segment.unlink()
        store.memory.unregister(segment)
        segment.close()

    def retry_memory(self) -> None:
        """In phase waiting_for_memory: tries again to make the ring, until the deadline."""
        replay = self._replay
        if self._pending_schema is not None:
            self.make_ring_or_wait(self._pending_schema)
            if self._pending_schema is not None:
                return
        waiting = [c for c in replay.sessions.of(CollectorSession) if c.segment is None]
        if not waiting and replay.store is None:
            replay.phase = Phase.WAITING_FOR_SCHEMA
            self._memory_wait_ends_s = None
        for collector in waiting:
            self._serve_collector(collector)
            if replay.phase is Phase.WAITING_FOR_MEMORY:
                return

    def make_ring_or_wait(self, schema: Schema) -> None:
        """Makes the ring of ``--schema``, or waits for a learner that still holds an earlier one; without one it raises BudgetExceeded."""
        self._pending_schema = None
        try:
            self.make_ring(schema, 1)
        except BudgetExceeded:
            if not self._may_wait_for_memory():
                raise
            self._replay.phase = Phase.WAITING_FOR_MEMORY
            self._pending_schema = schema

    def make_ring(self, schema: Schema, lanes: int) -> Store:
        """Makes the store. Clients that wait for it are told at once, or with ``--restore`` when it is full."""
        replay = self._replay
        store = self._build_store(replay, schema, lanes)
        self._memory_wait_ends_s = None
        if replay.config.restore is None:
            self._open(store)
            return store
        try:
            self._restoration = Restoration(replay, store, Manifest.load(Path(replay.config.restore)))
        except BaseException:
            store.memory.close()
            raise
        replay.phase = Phase.RESTORING
        return store

    def restore(self) -> bool:
        """One more block of the snapshot that is being restored; False when there is none. Raises InvalidRequest when it is damaged."""
        restoration, replay = self._restoration, self._replay
        if restoration is None or replay.phase is Phase.CLOSING:
            return False
        if restoration.step():
            self._restoration = None
            restoration.close()
            self._open(restoration.store)
            for collector in replay.sessions.of(CollectorSession):
                self._serve_collector(collector)
        replay.restored_share = restoration.share
        return True

    def stop_restoring(self) -> None:
        """Lets go of a snapshot that is half restored, and of its ring: the memory first, so that no copy is under way any more."""
        restoration, self._restoration = self._restoration, None
        if restoration is not None:
            with contextlib.suppress(DeviceError):
                restoration.store.memory.close()
            restoration.close()

    def _open(self, store: Store) -> None:
        replay = self._replay
        replay.store = store
        replay.phase = Phase.SERVING
        for client in replay.sessions.of(MappingSession):
            self.showing.show(client)

    def why_no_ring(self) -> str:
        """What a client waits for that has no ring yet."""
        holders = self._replay.directory.living_earlier_holders()
        if self._replay.phase is Phase.WAITING_FOR_MEMORY and holders:
            names = ", ".join(f"learner {h.name!r} (pid {h.pid})" for h in holders)
            return f"memory is still held by an earlier generation's ring: {names}; it lets go when it next calls, or ends"
        if self._replay.phase is Phase.RESTORING:
            return f"the ring is being restored from {self._replay.config.restore}: {self._replay.restored_share:.0%}"
        return "there is no schema yet: no collector has attached, and the server was started without --schema"

    def _check(self, hello: Hello) -> None:
        replay = self._replay
        if hello.version != PROTOCOL_VERSION:
            raise AttachRefused(
                f"the client speaks protocol {hello.version}, the server {PROTOCOL_VERSION}: install the same on both sides"
            )
        if replay.phase is Phase.CLOSING:
            raise ServerClosing("the server is closing")
        if replay.passes_on and hello.role in ("learner", "observer"):
            raise AttachRefused(
                f"server {replay.directory.endpoints.name!r} passes rows on to another node and has no ring: attach a {hello.role} there, "
                "or sample with a ClusterLearner"
            )
        if hello.run_id is not None and hello.run_id != replay.config.run_id:
            raise AttachRefused(f"the client belongs to run {hello.run_id!r}, this server to run {replay.config.run_id!r}")
        if hello.role == "collector" and (hello.schema is None or not 1 <= hello.lanes <= 2**20):
            raise InvalidRequest(f"a collector gives its schema and 1 to {2**20} lanes, not {hello.lanes}")
        is_here = hello.pid_namespace == self._namespace
        if is_here and hello.start_ticks and ProcessIdentity.of(hello.pid) != ProcessIdentity(hello.pid, hello.start_ticks):
            raise AttachRefused(
                f"process {hello.pid} is not the one that said HELLO: it ended and its pid is used again, or client and server live in "
                "two time namespaces (unshare --time); run both in one"
            )
        if hello.role != "admin":  # who comes to stop the server may use the reserve
            check_descriptors()
        if not is_here and hello.device_uuid is not None and hello.pid == os.getpid():
            raise AttachRefused(
                f"{hello.role} and server both have pid {hello.pid}, in two PID namespaces: CUDA IPC refuses that; share one"
            )

    def _welcome(self, session: Session) -> None:
        replay = self._replay
        replay.send(
            session,
            Welcome(
                session.token,
                replay.generation,
                session.hello.nonce,
                time.monotonic_ns(),
                self._me.pid,
                self._me.start_ticks,
                replay.directory.run_id,
                replay.phase.value,
                replay.config.seed,
                session.ordinal,
                replay.config.lease_ns,
            ),
        )

    def _serve_collector(self, session: CollectorSession) -> None:
        replay = self._replay
        try:
            schema = Schema.from_wire(session.hello.schema)
            if self._pending_schema is not None or self._restoration is not None:
                return  # the ring of --schema or --restore comes first
            store = replay.store or self.make_ring(schema, session.hello.lanes)
            self._lend_segment(session, schema, store)
        except BudgetExceeded as error:
            if replay.store is None and self._may_wait_for_memory():
                replay.phase = Phase.WAITING_FOR_MEMORY
                return
            self.refuse(session, "Hello", error)
        except ReplayError as error:
            self.refuse(session, "Hello", error)

    def _may_wait_for_memory(self) -> bool:
        if not self._replay.directory.living_earlier_holders():
            return False
        now_s = time.monotonic()
        if self._memory_wait_ends_s is None:
            self._memory_wait_ends_s = now_s + _MEMORY_WAIT_S
            log.warning("phase waiting_for_memory: %s", self.why_no_ring())
        return now_s < self._memory_wait_ends_s

    def _lend_segment(self, session: CollectorSession, schema: Schema, store: Store) -> None:
        config = self._replay.config
        different = store.schema.differences(schema)
        if different:
            raise SchemaMismatch(f"the collector's schema is not the ring's: {different}")
        slot_rows = slot_rows_for(config, session.hello.lanes)
        if slot_rows > store.ring.headroom:
            raise InvalidRequest(
                f"slots of {slot_rows:,} rows don't fit the headroom of {store.ring.headroom:,}: "
                f"start the server with --headroom {2 * slot_rows}"
            )
        slot_bytes = align(slot_rows * schema.stride)
        name = segment_name(self._replay.directory.run_id, f"slots{session.ordinal}")
        check_slots(config.depth, slot_bytes, schema.stride, free_host_bytes())
        segment = Segment.create(name, config.depth * slot_bytes)
        session.segment, session.slot_rows, session.slot_bytes = segment, slot_rows, slot_bytes
        session.credits = Credits(config.depth)
        session.copied_as = store.memory.register(segment)
        if session.copied_as.startswith("pageable"):
            log.warning("slots of %s are copied %s", session, session.copied_as)
        moments = [tally.field.name for tally in store.tallies]
        self._replay.send(
            session,
            SegmentLent(
                session.token,
                self._replay.generation,
                name,
                config.depth,
                slot_rows,
                slot_bytes,
                store.schema.to_wire(),
                moments,
                config.nonfinite,
                store.plan.layout.link is not None,
                finite_fields(config, store.schema),
                config.return_gamma,
                session.copied_as[:MAX_TEXT],
                self._replay.passes_on,
            ),
        )
