"""Guards removed on purpose: each class is one of the server's parts, or one side of the model, with one rule left out."""

from __future__ import annotations

from model.collector_side import CollectorSide
from model.daemon import Daemon, Stream
from model.learner_side import LearnerSide
from model.server_side import Answers, Message, ServerSide, Steps, credit_of
from model.states import Collector, CopyRows, Learner, Row, State
from model.world import World
from replay_server_protocol.messages import Grant, Publish
from replay_server_protocol.states import BufferState, LeaseEvent

from replay_server.credit import Credits, Verdict
from replay_server.flow import Flow
from replay_server.ingress import Ingress, Published
from replay_server.leases import Lease, Leases
from replay_server.requests import Granted, Requests
from replay_server.ring import Ring, Span
from replay_server.sessions import CollectorSession
from replay_server.storage import Write


class FloorWithoutLeases(Ring):
    def floor(self, oldest_lease_tail: int | None) -> int:
        return super().floor(None)


class CreditedAtSubmit(Credits):
    def submit(self, slot: int) -> None:
        super().submit(slot)
        super().credit(self.credited + 1, slot)

    def credit(self, number: int, slot: int) -> None: ...


class CreditsAtSubmit(ServerSide):
    def drain(self, daemon: Daemon, _: object) -> Answers:
        before = {token: session.credits.credited for token, session in daemon.sessions.items()}
        daemon.ingress.drain(0)
        return [credit_of(daemon, x) for token, x in daemon.sessions.items() if x.credits.credited > before[token]]


class CommitsAtLaunch(Stream):
    def completed(self) -> int:
        return len(self.tickets)


class SeesAllAtOnce(ServerSide):
    def may_commit(self, state: State) -> bool:
        return bool(state.device.stream)


class GrantsReservedRows(Requests):
    def grant(self, ring: Ring, flow: Flow, leases: Leases, now_ns: int) -> list[Granted]:
        all_visible = Ring(ring.capacity, ring.headroom)
        all_visible.reserved = all_visible.committed = ring.reserved
        return super().grant(all_visible, flow, leases, now_ns)


class ClockFirst(LearnerSide):
    def gathering(self, state: State, learner: Learner) -> Steps:
        if learner.is_late is None:
            yield f"{learner.name} reads the clock", lambda: state.having(self.clocked(learner))
        else:
            yield from super().gathering(state, learner)


class ClockBehind(LearnerSide):
    def is_late(self, grant: Grant) -> bool:
        return grant.deadline_ns < -1


class LongMemory(World):
    long_past = -2


class NeverRevokes(Leases):
    def expire(self, now_ns: int) -> list[Lease]:
        return []


class EndsAnyLease(Leases):
    def release(self, lease: int, session: int) -> Lease | None:
        found = next((x for x in self._open.values() if x.session == session), None)
        return None if found is None else self._end(found, LeaseEvent.RELEASE)


class PartingIsDeath(ServerSide):
    def end(self, daemon: Daemon, ended: tuple[int, bool]) -> Answers:
        return super().end(daemon, (ended[0], True))


class BuriesUnread(ServerSide):
    def may_bury(self, client: Collector | Learner) -> bool:
        return True


class LinksCompletedAfterTheEvent(Ingress):
    late: tuple[Write, ...] = ()

    def _links(self, collector: CollectorSession, message: Publish, span: Span) -> list[Write]:
        writes = super()._links(collector, message, span)
        own = len(self.ring.pieces(span.first_seq, span.rows))
        self.late = tuple(writes[own:])
        return writes[:own]

    def _submit(self, published: Published) -> None:
        super()._submit(published)
        for write in self.late:
            self.write(write.offset, write.content, lambda: None)


class NoWindowMask(LearnerSide):
    def is_in_window(self, seq: int, link: int, grant: Grant) -> bool:
        return True


class SameNumberAgain(LearnerSide):
    def next_number(self, learner: Learner) -> int:
        return learner.number


class KnowsOnlyTakenGrants(LearnerSide):
    def noted(self, learner: Learner, grant: Grant) -> Learner:
        is_taken = grant.number == learner.number and learner.buffer is BufferState.REQUESTED
        return super().noted(learner, grant) if is_taken else learner


class GivesRepeatsBack(LearnerSide):
    def is_repeat(self, learner: Learner, grant: Grant) -> bool:
        return False


class TakesRepeats(Credits):
    def judge(self, number: int) -> Verdict:
        return Verdict.NEW if number <= self.credited else super().judge(number)


class TakesGaps(Credits):
    def judge(self, number: int) -> Verdict:
        return Verdict.NEW if number > self.taken else Verdict.REPEAT


class AsksOnlyWho(ServerSide):
    def is_current(self, state: State, message: Message, client: Collector | Learner) -> bool:
        return state.is_open(client)

    def session_of(self, state: State, message: Message, client: Collector | Learner) -> int:
        return client.session


class TakesAnyCredit(CollectorSide):
    def is_mine(self, collector: Collector, session: int, generation: int) -> bool:
        return True


class NeverRepeats(CollectorSide):
    def may_repeat(self, state: State, collector: Collector) -> bool:
        return False


class TakesWhatFits(Ingress):
    def drain(self, now_ns: int) -> int:
        submitted = super().drain(now_ns)
        for published in [x for x in self._queue if self._may_go_on(x)]:
            self._queue.remove(published)
            self._submit(published)
        return submitted


class OneSegmentForAllSessions(World):
    def slot_read(self, state: State, op: CopyRows) -> tuple[Row, ...]:
        owner = next(segment.collector for segment in state.segments if segment.session == op.session)
        return [segment.slots[op.slot] for segment in state.segments if segment.collector == owner][-1]
