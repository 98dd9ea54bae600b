"""Whom or what a client waits for, in a sentence it can act on."""

from __future__ import annotations

import time

from replay_server_protocol.messages import Explain

from replay_server.replay import Phase, Replay, Store
from replay_server.sessions import CollectorSession, LearnerSession, Session


def explain(replay: Replay, session: Session, message: Explain, why_no_ring: str) -> str:
    """The reason for a wait of ``session``; ``why_no_ring`` is it while there is no ring."""
    if replay.phase is Phase.CLOSING:
        return "the server is closing"
    if replay.store is None:
        return why_no_ring
    if isinstance(session, CollectorSession):
        return why_no_credit(session, replay.store) or "nothing: every slot is the collector's"
    if isinstance(session, LearnerSession) and message.what == "sample":
        return why_no_grant(replay, session, replay.store) or "nothing: no request of this learner waits"
    return replay.flow.why_not_sample(1, replay.store.ring.committed, 0) or "nothing: rows can be sampled"


def why_no_credit(session: CollectorSession, store: Store) -> str | None:
    """What the collector's published slots wait for; None when it has none."""
    if not session.queued:
        return None
    blocked = store.ingress.why_blocked()
    head = store.ingress.head
    if blocked is None or head is None:
        return f"{session.queued} slots being copied"
    who = "its own slot" if head.collector is session else f"a slot of collector {head.collector.name!r} before it"
    since_ns = store.ingress.blocked_since_ns
    since = f" for {(time.monotonic_ns() - since_ns) / 1e9:.1f} s" if since_ns is not None else ""
    return f"{session.queued} published slots wait: {who} has waited{since} for {blocked}"


def why_no_grant(replay: Replay, session: LearnerSession, store: Store) -> str | None:
    """What the learner's oldest request waits for; None when none waits."""
    waiting = replay.requests.of(session.token)
    if not waiting:
        return None
    message = waiting[0].message
    reason = replay.flow.why_not_sample(message.rows, store.ring.committed, message.min_committed)
    if reason is None:
        return f"{replay.leases.count_of(session.token)} leases of this learner are open"
    return f"{reason}; {_who_collects(replay)}"


def _who_collects(replay: Replay) -> str:
    collectors = replay.sessions.of(CollectorSession)
    if not collectors:
        return f"no collector is attached ({replay.counters.sessions_opened} sessions so far)"
    last = min(collectors, key=lambda c: c.heard_s)
    return f"{len(collectors)} collectors are attached, collector {last.name!r} was heard last {time.monotonic() - last.heard_s:.1f} s ago"
