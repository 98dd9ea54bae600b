"""The daemon: one thread, one poller, and a loop that is the data path in its order."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable

import zmq
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import DeviceError, ReplayError
from replay_server_protocol.messages import Closing, Credit
from replay_server_protocol.process import spin_s
from replay_server_protocol.schema import Schema
from replay_server_protocol.states import SessionState
from replay_server_protocol.trace import check_writable

from replay_server.attach import AttachDesk
from replay_server.config import ServerConfig
from replay_server.debug_profile import recorded
from replay_server.departures import Departures
from replay_server.descriptors import require_descriptors, require_threads
from replay_server.dispatch import Dispatch
from replay_server.entrance import Entrance
from replay_server.explain import flow_state, stalls
from replay_server.reception import Reception
from replay_server.replay import Phase, Replay, Store
from replay_server.requests import grant_of
from replay_server.revocation import Revocation
from replay_server.run_directory import RunDirectory
from replay_server.showing import why_unlinked
from replay_server.snapshot.schedule import SnapshotSchedule
from replay_server.stall_log import StallLog
from replay_server.status import StatusSocket
from replay_server.stop_signals import StopSignals
from replay_server.store import choose_device, make_store
from replay_server.supervisor import Supervisor

log = logging.getLogger("replay_server")

CLOSING_GRACE_S = 2.0
_TEND_EVERY_S = 0.1
_BURY_EVERY_S = 0.002
_LOOP = "loop"
_LOOK_FOR_STALLS_EVERY_S = 1.0


class Server:
    """Serves until it is told to stop. Construction claims the name and binds the sockets, ``run`` is the loop, ``close`` ends it all."""

    def __init__(
        self,
        config: ServerConfig,
        signals: StopSignals | None = None,
        build_store: Callable[[Replay, Schema, int], Store] = make_store,
    ) -> None:
        """Claims, binds and, with a schema, allocates; ``signals`` stop it in good order, a second one at once."""
        require_descriptors()
        require_threads()
        if config.trace is not None:
            check_writable(config.trace)
        device = choose_device(config)
        schema = config.load_schema()
        self._directory = RunDirectory.claim(Endpoints.resolve(config.name, config.run_dir))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with contextlib.ExitStack() as undo:
            undo.callback(self._directory.release)
            self.replay = Replay.build(config, self._directory, device, self._context, time.monotonic())
            self._status = StatusSocket(self._context, self.replay)
            undo.pop_all()
        self._entrance = Entrance(self._directory, (self.replay.control.door, self._status.door), self.replay.counters)
        self._desk = AttachDesk(self.replay, build_store)
        self._reception = Reception(self.replay, self._desk, Dispatch(self.replay, self._desk, self.stop))
        self._departures = Departures(self.replay, self._desk, self._reception.take_all, self.stop)
        self._revocation = Revocation(self.replay)
        self._signals = signals
        self._supervisor = Supervisor.of(os.environ if config.parent_pid is None else {})  # a spawned server doesn't speak for its parent
        self._closing_until_s: float | None = None
        self._tend_at_s = 0.0
        self._stall_log = StallLog(round(config.stall_after * 1e9))
        self._stalls_at_s = 0.0
        self._is_unlinked_told = False
        self._schedule = self._make_schedule()
        self._made_progress = True
        self._spin_s = spin_s()
        self._spin_until_s = 0.0
        self._is_status_asked = False
        try:
            self._poller = self._make_poller()
            if config.parent_pid is not None:
                self._departures.watch_parent(config.parent_pid)
            if schema is not None:
                self._desk.make_ring_or_wait(schema)
        except BaseException:
            self.close()
            raise
        if self._directory.swept:
            log.info("swept %d segments of a killed predecessor", len(self._directory.swept))

    def run(self) -> None:
        """Serves until ``stop`` and the clients' detaching, at most CLOSING_GRACE_S after it."""
        endpoints = self._directory.endpoints
        log.info("serving %r in %s (pid %d, generation %d)", endpoints.name, endpoints.run_dir, os.getpid(), self._directory.generation)
        with recorded(self.replay.config.debug_profile):
            self._serve()

    def _serve(self) -> None:
        while not self._is_finished():
            self._wait()
            self._entrance.mind(time.monotonic())
            self._made_progress |= self._reception.take_turn()
            self._made_progress |= self._desk.restore()
            self._drain()
            self._commit()
            self._grant()
            self._note()
            self._revoke()
            self.replay.flow_clock.tell(flow_state(self.replay), time.monotonic_ns())
            self._made_progress |= self._status.answer_nowait(is_busy=not self._is_status_asked)
            if self.replay.tracing.is_collecting:
                self._made_progress |= self.replay.tracing.step(time.monotonic())
            self._tend()

    def stop(self) -> None:
        """Begins to close: clients are told and given time to detach. A second call ends at once."""
        if self._closing_until_s is not None:
            self._closing_until_s = 0.0
            return
        self._closing_until_s = time.monotonic() + CLOSING_GRACE_S
        self.replay.phase = Phase.CLOSING
        self._supervisor.stopping()
        clients = sum(session.hello.role != "admin" for session in self.replay.sessions)  # an admin is who asked
        if clients:
            log.info("closing: %d %s %.0f s to detach", clients, "client has" if clients == 1 else "clients have", CLOSING_GRACE_S)
        else:
            log.info("closing: no client is attached")
        for session in self.replay.sessions:
            self.replay.send(session, Closing(session.token, self.replay.generation, round(CLOSING_GRACE_S * 1e9)))

    def close(self) -> None:
        """Lets go of sockets, memory and files. An exported CUDA ring is left to the process's end: a learner may still map it."""
        replay = self.replay
        for session in replay.sessions:
            self._desk.end(session, "the server ends")
        if replay.tracing.since_s is not None:
            log.warning("a trace was on, and nobody took it: `replay-server trace stop FILE` does, before the server ends")
        replay.tracing.sweep()
        replay.mailboxes.close()
        if self._schedule is not None:
            self._schedule.close()
        self._desk.stop_restoring()
        if replay.store is not None:
            try:
                replay.store.memory.close()
            except DeviceError as error:  # the device is lost: what follows must still be given back
                log.error("%s", error)
        self._status.close()
        replay.control.close()
        replay.deaths.close()
        self._context.term()
        self._directory.release()
        self._save_trace()

    def _save_trace(self) -> None:
        """Last of all, when nobody waits for this server any more. A trace that can't be written is told and harms nothing else."""
        trace, path = self.replay.tracing.trace, self.replay.config.trace
        if trace is None or path is None:
            return
        try:
            trace.save(path)
        except ReplayError as error:
            log.error("%s", error)
        else:
            log.info("wrote %d spans to %s, %d older ones were dropped", trace.size, path, trace.dropped)

    def _make_schedule(self) -> SnapshotSchedule | None:
        config = self.replay.config
        if config.snapshot_every is None or config.snapshot_dir is None:
            return None
        endpoints, every_s = self._directory.endpoints, config.snapshot_every
        return SnapshotSchedule(endpoints, config.snapshot_dir, every_s, config.snapshot_keep, time.monotonic())

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        doors = (self.replay.control.door, self._status.door)
        for source in (
            *(door.socket for door in doors),
            *(door.way.fileno() for door in doors),
            self.replay.deaths.fileno(),
            self._signals,
        ):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        return poller

    def _is_finished(self) -> bool:
        for _ in range(self._signals.take() if self._signals is not None else 0):
            self.stop()
        if self._closing_until_s is None:
            return False
        return len(self.replay.sessions) == 0 or time.monotonic() >= self._closing_until_s

    def _wait(self) -> None:
        """Sleeps until a socket, a death, a signal or a timer, unless something got done just now or copies are in flight."""
        store = self.replay.store
        now_s = time.monotonic()
        self._is_status_asked = False
        if self._made_progress:
            self._made_progress = False
            self._spin_until_s = now_s + self._spin_s
            return
        if now_s < self._spin_until_s or (store is not None and store.ingress.slots_in_flight):
            return
        if store is not None and not store.ingress.is_consistent():
            raise ReplayError("this is a bug of the server: rows in flight don't add up")
        until_s = self._tend_at_s
        deadline_ns = self.replay.leases.next_deadline_ns
        if deadline_ns is not None:
            until_s = min(until_s, deadline_ns / 1e9)
        if self._status.rest_until_s > now_s:
            until_s = min(until_s, self._status.rest_until_s)
        self._poller.modify(self._status.socket, zmq.POLLIN if self._status.rest_until_s <= now_s else 0)
        left_s = max(0.0, until_s - now_s)
        ready = dict(self._poller.poll(int(left_s * 1000) + 1))
        self._is_status_asked = self._status.socket in ready
        if self.replay.deaths.fileno() in ready:
            self._tend_at_s = 0.0

    def _drain(self) -> None:
        store = self.replay.store
        if store is None:
            return
        begin_ns = time.monotonic_ns()
        slots = store.ingress.drain(begin_ns)
        if slots:
            self._made_progress = True
            self._trace("drain", begin_ns, slots=slots)

    def _commit(self) -> None:
        """Rows whose copies were seen complete become visible, and only then their slots' credits go back."""
        store = self.replay.store
        if store is None:
            return
        begin_ns = time.monotonic_ns()
        credited = store.ingress.commit(begin_ns)
        for collector in credited:
            self._made_progress = True
            if collector.state is SessionState.ENDED:
                self._desk.let_go(collector)
                continue
            credit = Credit(collector.token, self.replay.generation, collector.credits.credited, collector.last_committed_seq)
            self.replay.send(collector, credit)
        if credited:
            self._trace("commit", begin_ns, committed=store.ring.committed, collectors=len(credited))

    def _grant(self) -> None:
        replay = self.replay
        if not len(replay.requests) or replay.store is None or replay.phase is Phase.CLOSING:
            return
        now_ns = time.monotonic_ns()
        grants = replay.requests.grant(replay.store.ring, replay.flow, replay.leases, now_ns)
        for granted in grants:
            self._made_progress = True
            learner, lease = granted.learner, granted.lease
            replay.counters.batches_granted += 1
            replay.grant_latency.note(now_ns - granted.asked_ns)
            replay.send(learner, grant_of(lease, granted.message))
        if grants:
            self._trace("grant", now_ns, leases=len(grants), committed=replay.store.ring.committed)

    def _note(self) -> None:
        if self.replay.store is not None:
            self.replay.store.ingress.note()

    def _revoke(self) -> None:
        now_ns = time.monotonic_ns()
        leases = self._revocation.end_overdue(now_ns, is_read_empty=self._reception.is_read_empty)
        if leases:
            self._made_progress = True
            self._trace("revoke", now_ns, leases=leases)

    def _trace(self, verb: str, begin_ns: int, **args: int) -> None:
        trace = self.replay.tracing.trace
        if trace is not None:
            trace.record(_LOOP, verb, begin_ns, trace.now_ns(), **args)

    def _tend(self) -> None:
        """Now and then: deaths, lost connections, memory that may have come free, rates."""
        now_s = time.monotonic()
        if now_s < self._tend_at_s:
            return
        self._tend_at_s = now_s + _TEND_EVERY_S
        if self._departures.bury(now_s):
            self._made_progress = True
        if self._departures.is_waiting:
            self._tend_at_s = now_s + _BURY_EVERY_S
        for session in self.replay.sessions:
            self._departures.probe(session, now_s)
        if self.replay.phase is Phase.WAITING_FOR_MEMORY:
            self._desk.retry_memory()
        if now_s >= self._stalls_at_s:
            self._stalls_at_s = now_s + min(_LOOK_FOR_STALLS_EVERY_S, self.replay.config.stall_after)
            for line in self._stall_log.tell(stalls(self.replay, self._desk.why_no_ring), time.monotonic_ns()):
                log.warning("%s", line)
        self._tell_unlinked()
        if self._entrance.find_files(now_s):
            self._desk.showing.note_holders()
        if self._schedule is not None and self.replay.phase is not Phase.CLOSING:
            store = self.replay.store
            self._schedule.tend(now_s, has_rows=store is not None and store.ring.size > 0)
        counters = self.replay.counters
        self.replay.rates.note(now_s, counters.rows_committed, counters.batches_granted)
        phase = self.replay.phase
        self._supervisor.tell(self.replay.phase_text, now_s, is_ready=phase in (Phase.SERVING, Phase.WAITING_FOR_SCHEMA))

    def _tell_unlinked(self) -> None:
        """Once, when somebody has removed the ring's name."""
        store = self.replay.store
        if store is not None and not self._is_unlinked_told and store.memory.place.segments_unlinked:
            self._is_unlinked_told = True
            log.error("%s", why_unlinked(store))
