"""What each message of an open session does. One that a role may not send, or that breaks a rule, is refused and changes nothing."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from replay_server_protocol.errors import InvalidRequest, ProtocolViolation, ReplayError
from replay_server_protocol.messages import (
    MAX_TEXT,
    Admin,
    Bye,
    Cancel,
    Capture,
    ClientMessage,
    Credit,
    Done,
    Explain,
    Grant,
    MailAsk,
    MailLent,
    MailNews,
    MailPost,
    MailReturn,
    MailSlot,
    MailWritten,
    Mapped,
    Observe,
    Proof,
    Publish,
    Reason,
    Release,
    Sample,
    Traced,
    Unused,
)

from replay_server.attach import AttachDesk
from replay_server.config import MIN_AUTO_SLOT_ROWS, number
from replay_server.credit import Verdict
from replay_server.explain import explain
from replay_server.flow import Flow
from replay_server.replay import Replay
from replay_server.requests import grant_of, observe
from replay_server.sessions import CollectorSession, LearnerSession, MappingSession, ObserverSession, Session
from replay_server.snapshot.capture import capture

log = logging.getLogger("replay_server")

Action = Callable[[Any, Any], None]  # a session of the role, a message of the type

_USUAL_BATCH_ROWS = 4096


class Dispatch:
    """Acts on checked messages of known sessions. One table says which role may send what: what is not in it is refused."""

    def __init__(self, replay: Replay, desk: AttachDesk, stop: Callable[[], None]) -> None:
        self._replay = replay
        self._desk = desk
        self._stop = stop
        of_all: dict[type[ClientMessage], Action] = {
            Explain: self._explain,
            MailAsk: self._lend_mail,
            MailReturn: self._take_mail_back,
            Traced: replay.tracing.take,
            Bye: lambda session, bye: desk.end(session, "bye"),
        }
        self._actions: Mapping[str, Mapping[type[ClientMessage], Action]] = {
            "collector": {**of_all, Mapped: desk.mapped, Publish: self._publish},
            "learner": {
                **of_all,
                Proof: desk.showing.prove,
                Sample: self._sample,
                Release: self._release,
                Unused: self._refund,
                Cancel: self._cancel,
                MailPost: self._open_mail,
                MailWritten: self._finish_mail,
                Observe: self._observe,
            },
            "observer": {**of_all, Proof: desk.showing.prove, Observe: self._observe, Release: self._end_look, Capture: self._capture},
            "admin": {**of_all, Admin: self._administer},
        }

    def take(self, session: Session, message: ClientMessage) -> None:
        """Acts on one message; a rule broken is answered by REFUSED."""
        try:
            self._act(session, message)
        except ReplayError as error:
            if isinstance(error, ProtocolViolation):
                self._replay.counters.bad_messages += 1
            number = getattr(message, "number", 0)
            sampler = getattr(message, "sampler", 0)
            about = type(message).__name__
            self._replay.send(session, self._desk.refusal(session.token, about, error, sampler, number))

    def _act(self, session: Session, message: ClientMessage) -> None:
        role, kind = session.hello.role, type(message)
        action = self._actions[role].get(kind)
        if action is None:
            raise ProtocolViolation(f"a {role} doesn't send {kind.__name__}")
        action(session, message)

    def _explain(self, session: Session, message: Explain) -> None:
        text = explain(self._replay, session, message, self._desk.why_no_ring())
        self._replay.send(session, Reason(session.token, self._replay.generation, message.what, text[:MAX_TEXT]))

    def _publish(self, session: CollectorSession, message: Publish) -> None:
        store = self._replay.store
        if store is None or session.segment is None:
            raise ProtocolViolation("there is nothing to publish: this session has no slots yet")
        verdict = store.ingress.accept(session, message, time.monotonic_ns())
        if verdict is Verdict.REPEAT and message.number <= session.credits.credited:
            credit = Credit(session.token, self._replay.generation, session.credits.credited, session.last_committed_seq)
            self._replay.send(session, credit)

    def _sample(self, session: LearnerSession, message: Sample) -> None:
        replay, store = self._replay, self._replay.store
        if store is None or not session.is_proved:
            raise ProtocolViolation("a learner proves its mapping before it samples")
        if message.rows > store.ring.capacity:
            raise InvalidRequest(f"a batch of {message.rows:,} rows is above the capacity of {store.ring.capacity:,}")
        session.largest_batch_rows = max(session.largest_batch_rows, message.rows)
        impossible = replay.flow.why_impossible(message.rows, store.plan.slot_rows)
        if impossible:
            raise InvalidRequest(impossible)
        lease = replay.leases.find(session.token, message.sampler, message.number)
        if lease is None:
            replay.requests.ask(session, message, time.monotonic_ns())
            return
        replay.send(session, grant_of(lease, message))  # a repeat: the first grant may be lost

    def _observe(self, session: MappingSession, message: Observe) -> None:
        replay, store = self._replay, self._replay.store
        if store is None or not session.is_proved:
            raise ProtocolViolation("a client proves its mapping before it looks at rows")
        lease = observe(message, store.ring, replay.leases, time.monotonic_ns())
        replay.send(
            session, Grant(*message[:2], message.sampler, message.number, lease.lease, lease.tail, lease.committed, lease.deadline_ns)
        )

    def _capture(self, session: ObserverSession, message: Capture) -> None:
        if self._replay.store is None:
            raise ProtocolViolation("a client is shown the ring before it asks for what lies beside it")
        self._replay.send(session, capture(self._replay, self._replay.store, session.token, message.number))

    def _end_look(self, session: ObserverSession, message: Release) -> None:
        leases = self._replay.leases
        if leases.release(message.lease, session.token) is None and leases.take_revoked(message.lease, session.token) is None:
            self._replay.counters.stale_messages += 1
        session.reads += 1

    def _cancel(self, session: LearnerSession, message: Cancel) -> None:
        self._replay.requests.cancel(session.token, message.sampler, message.number)

    def _release(self, session: LearnerSession, message: Release) -> None:
        replay = self._replay
        lease = replay.leases.release(message.lease, session.token)
        if lease is None:
            lease = replay.leases.take_revoked(message.lease, session.token)
            replay.counters.stale_messages += lease is None or lease.rows > 0
            if lease is not None and message.is_used:  # refunded when it was revoked, and used all the same
                replay.flow.sample(lease.counted_rows)
                session.refundable_rows += lease.counted_rows
        elif message.is_used:
            session.refundable_rows += lease.counted_rows
        else:
            replay.flow.refund(lease.counted_rows)
        if not message.is_used:
            session.dropped += 1
            replay.counters.batches_dropped += 1
        elif lease is not None and lease.rows:  # without rows it was a look
            session.batches += 1
            session.rows += lease.rows

    def _refund(self, session: LearnerSession, message: Unused) -> None:
        """Refunds what this session had, whatever it says: the band holds also beside a learner that miscounts."""
        rows = min(message.rows, session.refundable_rows)
        session.refundable_rows -= rows
        self._replay.flow.refund(rows)
        session.dropped += 1
        self._replay.counters.batches_dropped += 1

    def _open_mail(self, session: LearnerSession, message: MailPost) -> None:
        segment = self._replay.mailboxes.post(session.token, message)
        self._replay.send(session, MailSlot(session.token, self._replay.generation, message.number, segment.name, segment.n_bytes))

    def _lend_mail(self, session: Session, message: MailAsk) -> None:
        token, generation = session.token, self._replay.generation
        if self._replay.passes_on:
            raise InvalidRequest(f"mailbox {message.name!r}: a forwarder passes rows on and no mailboxes; send values to this node by Ray")
        lent = self._replay.mailboxes.lend(token, message.name, message.newer_than)
        if lent is None:
            self._replay.send(session, MailLent(token, generation, message.name, 0, "", 0, {}))
            return
        segment = lent.segment
        self._replay.send(session, MailLent(token, generation, message.name, lent.version, segment.name, segment.n_bytes, lent.manifest))

    def _take_mail_back(self, session: Session, message: MailReturn) -> None:
        self._replay.mailboxes.give_back(session.token, message.name, message.version)

    def _finish_mail(self, session: LearnerSession, message: MailWritten) -> None:
        """The news goes out before the poster is told: it is on its way when ``post`` returns."""
        replay = self._replay
        version = replay.mailboxes.finish(session.token, message.number)
        subscribers = replay.mailboxes.subscribers(version.mailbox)
        for other in replay.sessions:
            if other.token in subscribers:
                replay.send(other, MailNews(other.token, replay.generation, version.mailbox, version.version))
        replay.send(session, Done(session.token, replay.generation, message.number, version.version))

    def _administer(self, session: Session, message: Admin) -> None:
        replay = self._replay
        if message.verb == "set":
            self._set(message.key, message.value)
        elif message.verb == "trace-start":
            replay.tracing.start(list(replay.sessions))
            log.info("a trace is on")
        elif message.verb == "trace-stop":
            replay.tracing.stop(session, message.number, message.value, list(replay.sessions))
            return  # answered once the clients have handed in
        replay.send(session, Done(session.token, replay.generation, message.number, 0))
        if message.verb == "stop":
            self._stop()

    def _set(self, key: str, value: str) -> None:
        """Changes flow control. A ratio set where no tolerance was ever given brings one with it, for batches of up to 4,096 rows."""
        flow = self._replay.flow
        try:
            match key.replace("_", "-"):
                case "samples-per-insert" if value == "none":
                    self._set_ratio(None)
                case "samples-per-insert":
                    ratio = float(number(value, float))
                    tolerance = flow.tolerance or math.ceil(_USUAL_BATCH_ROWS + ratio * self._largest_slot_rows())
                    self._check_flow(ratio, tolerance)
                    self._set_ratio(ratio)
                    flow.set_tolerance(tolerance)
                case "tolerance":
                    tolerance = int(number(value, int))
                    self._check_flow(flow.samples_per_insert, tolerance)
                    flow.set_tolerance(tolerance)
                case _:
                    raise InvalidRequest(f"set {key!r}: samples-per-insert and tolerance can be set on a running server")
        except InvalidRequest:
            raise
        except (ValueError, OverflowError) as error:
            raise InvalidRequest(f"set {key} {value!r}: {error}") from error

    def _set_ratio(self, samples_per_insert: float | None) -> None:
        """What was sampled before counts no more: nor may it be refunded."""
        self._replay.flow.set_ratio(samples_per_insert)
        self._replay.leases.count_no_more()
        for learner in self._replay.sessions.of(LearnerSession):
            learner.refundable_rows = 0

    def _largest_slot_rows(self) -> int:
        return max((collector.slot_rows for collector in self._replay.sessions.of(CollectorSession)), default=MIN_AUTO_SLOT_ROWS)

    def _check_flow(self, samples_per_insert: float | None, tolerance: int) -> None:
        """Raises InvalidRequest if the batches asked for so far could dead-end with the present slots."""
        learners = self._replay.sessions.of(LearnerSession)
        batch_rows = max((learner.largest_batch_rows for learner in learners), default=0) or 1
        asked = Flow(samples_per_insert=samples_per_insert, tolerance=tolerance)
        impossible = asked.why_impossible(batch_rows, self._largest_slot_rows())
        if impossible:
            raise InvalidRequest(impossible)
