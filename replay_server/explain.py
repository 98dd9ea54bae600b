"""Whom or what a client waits for, in a sentence it can act on: what is missing, at which seq, who is late, since when, what to try."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property

from replay_server_protocol.messages import Explain

from replay_server.flow import FlowState
from replay_server.replay import Phase, Replay, Store
from replay_server.requests import Waiting
from replay_server.sessions import CollectorSession, LearnerSession, Session
from replay_server.stall_log import Stall
from replay_server.units import counted

_SILENT_S = 1.0
"""Who was heard later is no suspect."""


def explain(replay: Replay, session: Session, message: Explain, why_no_ring: str) -> str:
    """The reason for a wait of ``session``; ``why_no_ring`` is it while there is no ring."""
    if replay.phase is Phase.CLOSING:
        return "the server is closing"
    if replay.store is None:
        return why_no_ring
    look = Look(replay, replay.store)
    if isinstance(session, CollectorSession):
        return look.why_no_credit(session) or "nothing: every slot is the collector's"
    if isinstance(session, LearnerSession) and message.what == "sample":
        return look.why_no_grant(session) or "nothing: no request of this learner waits"
    reason = replay.flow.why_not_sample(1, replay.store.ring.committed, 0)
    return f"{reason}; {look.who_collects}" if reason else "nothing: rows can be sampled"


def flow_state(replay: Replay) -> FlowState:
    """Who waits for what: the head of the published slots, and the oldest request. Asked at every turn of the loop.

    Collectors that wait for copies under way wait for nobody: then a waiting learner decides.
    """
    store = replay.store
    if store is None or replay.phase is not Phase.SERVING:
        return FlowState(replay.phase.value)
    collectors = store.ingress.blocked_by()
    learners = replay.requests.blocked_by(store.ring, replay.flow, replay.leases)
    if learners is None or collectors is None:
        return learners or collectors or FlowState.FREE
    return learners if collectors is FlowState.COLLECTORS_WAIT_FOR_COPIES else FlowState.BOTH_WAIT


def stalls(replay: Replay, why_no_ring: Callable[[], str]) -> list[Stall]:
    """Everything that waits now, however short: the first published slot, the oldest copy, the oldest request of each learner; the ring."""
    is_asked_for = replay.phase is Phase.WAITING_FOR_SCHEMA and replay.sessions.of(LearnerSession)
    if replay.phase in (Phase.WAITING_FOR_MEMORY, Phase.RESTORING) or is_asked_for:
        return [Stall("ring", "the ring", replay.flow_clock.since_ns, why_no_ring)]
    if replay.store is None or replay.phase is Phase.CLOSING:
        return []
    return Look(replay, replay.store).stalls()


class Look:
    """What waits at one moment. Each sentence is made at most once, when it is asked for: a report tells it of every client."""

    def __init__(self, replay: Replay, store: Store) -> None:
        self._replay = replay
        self._store = store

    def why_no_credit(self, session: CollectorSession) -> str | None:
        """What the collector's published slots wait for; None when it has none."""
        ingress, head = self._store.ingress, self._store.ingress.head
        if not session.queued:
            return None
        if self.blocked is None or head is None:
            return f"{counted(session.queued, 'slot')} being copied"
        them = "it" if session.queued == 1 else "them"
        who = "the first" if head.collector is session else f"a slot of collector {head.collector.name!r} before {them}"
        since_ns = ingress.blocked_since_ns
        since = f" {(time.monotonic_ns() - since_ns) / 1e9:.1f} s" if since_ns is not None else ""
        slots = "1 published slot waits: " if session.queued == 1 else f"{session.queued} published slots wait: "
        return f"{slots}{who} has waited{since} for {self.blocked}"

    def why_no_grant(self, session: LearnerSession) -> str | None:
        """What the learner's oldest request waits for; None when none waits."""
        waiting = self._replay.requests.of(session.token)
        return self._why_not_granted(waiting[0]) if waiting else None

    def why_flow_waits(self, state: FlowState) -> str | None:
        """``state`` in words and numbers, without names; None when nobody waits."""
        oldest = self._replay.requests.oldest
        collectors = self._store.ingress.why_blocked() if state.blocked_side in ("collectors", "both") else None
        learners = None
        if state is FlowState.LEARNERS_WAIT_FOR_RELEASE:
            learners = "as many leases of one learner are open as it may have"
        elif oldest is not None and state.blocked_side in ("learners", "both"):
            committed = self._store.ring.committed
            learners = self._replay.flow.why_not_sample(oldest.message.rows, committed, oldest.message.min_committed)
        if collectors and learners:
            return f"collectors: {collectors}; learners: {learners}"
        return collectors or learners

    def stalls(self) -> list[Stall]:
        ingress, head, copy = self._store.ingress, self._store.ingress.head, self._store.ingress.oldest_copy
        found = [self._stall_of(waiting) for waiting in self._replay.requests.oldest_of_each()]
        if head is not None and ingress.blocked_since_ns is not None:
            rows = counted(head.rows, "row")
            who = f"publish {head.message.number} of {head.collector}, {rows} for seq {self._store.ring.reserved:,} on,"
            found.append(Stall("publish", who, ingress.blocked_since_ns, lambda: self.blocked or "the loop's next turn"))
        if copy is not None and copy.published is not None:
            who = f"the copy of seq {copy.span.first_seq:,} to {copy.span.end_seq:,} from {copy.published.collector}"
            found.append(
                Stall("copy", who, copy.published.received_ns, lambda: "the device is overloaded or hangs; see nvidia-smi and dmesg")
            )
        return found

    @cached_property
    def blocked(self) -> str | None:
        """What the first published slot waits for, and who is late; None when none waits."""
        ingress, lease = self._store.ingress, self._replay.leases.oldest
        reason = ingress.why_blocked()
        match ingress.blocked_by():
            case FlowState.COLLECTORS_WAIT_FOR_LEASE if lease is not None:
                learner, now_ns = self._replay.sessions.find(lease.session), time.monotonic_ns()
                holder = _heard(learner) if learner is not None else "a learner that has said bye"
                left_s, open_s = max(0, lease.deadline_ns - now_ns) / 1e9, (now_ns - lease.opened_ns) / 1e9
                return f"{reason}: granted {open_s:.1f} s ago to {holder}; it ends by itself in {left_s:.1f} s (--lease)"
            case FlowState.COLLECTORS_WAIT_FOR_SAMPLES:
                return f"{reason}; {self.who_learns}"
            case _:
                return reason

    @cached_property
    def who_collects(self) -> str:
        """From whom rows are awaited."""
        collectors = self._replay.sessions.of(CollectorSession)
        if not collectors:
            return self._nobody("collector")
        if len(collectors) == 1:
            return f"its rows are to come from {_heard(collectors[0])}: it must write, and flush() before a pause"
        last, first = max(collectors, key=lambda c: c.heard_s), min(collectors, key=lambda c: c.heard_s)
        return f"{len(collectors)} collectors are attached, the latest word came from {_heard(last)}, the oldest from {_heard(first)}"

    @cached_property
    def who_learns(self) -> str:
        """Who is to draw rows."""
        learners = self._replay.sessions.of(LearnerSession)
        if not learners:
            return f"{self._nobody('learner')}, or lift the limit: replay-server set samples-per-insert none"
        late = min(learners, key=lambda learner: learner.heard_s)
        asking = len(self._replay.requests.oldest_of_each())
        told = f"{asking} of {counted(len(learners), 'learner')} waiting for rows"
        is_silent = time.monotonic() - late.heard_s >= _SILENT_S or late.process.is_stopped()
        return f"{told}, silent longest is {_heard(late)}" if is_silent else told

    def _nobody(self, role: str) -> str:
        """For how long there has been none, and who was the last."""
        now_s, last = time.monotonic(), self._replay.sessions.last_ended(role)
        if last is None:
            return f"no {role} in the {now_s - self._replay.started_s:.0f} s since the server's start; start one"
        session, ended_s = last
        return f"no {role} for {now_s - ended_s:.0f} s (the last was {session.name!r}, pid {session.hello.pid}); start one"

    def _why_not_granted(self, waiting: Waiting) -> str:
        message = waiting.message
        reason = self._replay.flow.why_not_sample(message.rows, self._store.ring.committed, message.min_committed)
        if reason is not None:
            return f"{reason}; {self.who_collects}"
        open_leases = self._replay.leases.count_of(waiting.learner.token)
        are = "is" if open_leases == 1 else "are"
        return f"{counted(open_leases, 'lease')} of this learner {are} open, as many as it may have; it is {_heard(waiting.learner)}"

    def _stall_of(self, waiting: Waiting) -> Stall:
        who = f"request {waiting.message.number} of {waiting.learner} for {counted(waiting.message.rows, 'row')}"
        return Stall(f"request of {waiting.learner.token}", who, waiting.asked_ns, lambda: self._why_not_granted(waiting))


def _heard(session: Session) -> str:
    """Who it is, when it was heard last, and whether its process is stopped."""
    stopped = ", its process is stopped: continue it (kill -CONT) or end it" if session.process.is_stopped() else ""
    return f"{session}, heard last {time.monotonic() - session.heard_s:.1f} s ago{stopped}"
