"""What each message of an open session does. A message a role may not send, or that breaks a rule, is refused by name and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from replay_server_protocol.errors import InvalidRequest, ProtocolViolation, ReplayError
from replay_server_protocol.messages import (
    Admin,
    Bye,
    Cancel,
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
    Proof,
    Publish,
    Reason,
    Release,
    Sample,
)

from replay_server.attach import AttachDesk
from replay_server.credit import Verdict
from replay_server.explain import explain
from replay_server.replay import Replay
from replay_server.sessions import CollectorSession, LearnerSession, Session


class Dispatch:
    """Acts on checked messages of known sessions."""

    def __init__(self, replay: Replay, desk: AttachDesk, stop: Callable[[], None]) -> None:
        self._replay = replay
        self._desk = desk
        self._stop = stop

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
        match session, message:
            case CollectorSession(), Publish():
                self._publish(session, message)
            case LearnerSession(), Sample():
                self._sample(session, message)
            case LearnerSession(), Release():
                self._release(session, message)
            case LearnerSession(), Cancel():
                self._replay.requests.cancel(session.token, message.sampler, message.number)
            case LearnerSession(), Proof():
                self._desk.prove(session, message)
            case CollectorSession(), Mapped():
                self._desk.mapped(session)
            case _, Explain():
                text = explain(self._replay, session, message, self._desk.why_no_ring())
                self._replay.send(session, Reason(session.token, self._replay.generation, message.what, text[:4000]))
            case _, MailAsk():
                self._lend_mail(session, message)
            case _, MailReturn():
                self._replay.mailboxes.give_back(session.token, message.name, message.version)
            case LearnerSession(), MailPost():
                segment = self._replay.mailboxes.post(session.token, message)
                self._replay.send(session, MailSlot(session.token, self._replay.generation, message.number, segment.name, segment.n_bytes))
            case LearnerSession(), MailWritten():
                self._finish_mail(session, message)
            case _, Admin() if session.hello.role == "admin":
                self._administer(session, message)
            case _, Bye():
                self._desk.end(session, "bye")
            case _:
                raise ProtocolViolation(f"a {session.hello.role} doesn't send {type(message).__name__}")

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
        impossible = replay.flow.why_impossible(message.rows, store.plan.slot_rows)
        if impossible:
            raise InvalidRequest(impossible)
        lease = replay.leases.find(session.token, message.sampler, message.number)
        if lease is None:
            replay.requests.ask(session, message, time.monotonic_ns())
            return
        youngest = 0 if message.max_age_rows is None else lease.committed - message.max_age_rows
        grant = Grant(
            session.token,
            replay.generation,
            message.sampler,
            message.number,
            lease.lease,
            max(lease.tail, youngest),
            lease.committed,
            lease.deadline_ns,
        )
        replay.send(session, grant)

    def _release(self, session: LearnerSession, message: Release) -> None:
        replay = self._replay
        lease = replay.leases.release(message.lease, session.token)
        if lease is None:
            replay.counters.stale_messages += 1
        if lease is not None and not message.is_used:
            replay.flow.refund(lease.rows)
        if not message.is_used:
            session.dropped += 1
            replay.counters.batches_dropped += 1

    def _lend_mail(self, session: Session, message: MailAsk) -> None:
        token, generation = session.token, self._replay.generation
        lent = self._replay.mailboxes.lend(token, message.name, message.newer_than)
        if lent is None:
            self._replay.send(session, MailLent(token, generation, message.name, 0, "", 0, {}))
            return
        segment = lent.segment
        self._replay.send(session, MailLent(token, generation, message.name, lent.version, segment.name, segment.n_bytes, lent.manifest))

    def _finish_mail(self, session: LearnerSession, message: MailWritten) -> None:
        replay = self._replay
        version = replay.mailboxes.finish(session.token, message.number)
        replay.send(session, Done(session.token, replay.generation, message.number, version.version))
        subscribers = replay.mailboxes.subscribers(version.mailbox)
        for other in replay.sessions:
            if other.token in subscribers:
                replay.send(other, MailNews(other.token, replay.generation, version.mailbox, version.version))

    def _administer(self, session: Session, message: Admin) -> None:
        replay = self._replay
        if message.verb == "set":
            self._set(message.key, message.value)
        replay.send(session, Done(session.token, replay.generation, message.number, 0))
        if message.verb == "stop":
            self._stop()

    def _set(self, key: str, value: str) -> None:
        flow = self._replay.flow
        try:
            match key.replace("_", "-"):
                case "samples-per-insert":
                    flow.set_ratio(None if value == "none" else float(value))
                case "tolerance":
                    flow.set_tolerance(int(value))
                case _:
                    raise InvalidRequest(f"set {key!r}: samples-per-insert and tolerance can be set on a running server")
        except ValueError as error:
            raise InvalidRequest(f"set {key} {value!r}: {error}") from error
