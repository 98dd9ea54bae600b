"""The status report and its socket: answers only, and never more than a twentieth of the loop's time."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict

import zmq

from replay_server.control import open_door, receive_nowait
from replay_server.counters import Latency
from replay_server.explain import Look, flow_state
from replay_server.replay import Replay, Store
from replay_server.sessions import CollectorSession, LearnerSession, ObserverSession

REPORT_VERSION = 1
_SHARE_OF_TIME = 20
_LOOK_EVERY_S = 0.003
_MOST_BYTES = 1024
_MOST_UNREAD = 16
_MOST_UNSENT = 4
"""Reports that a client doesn't read are some 10 KB each: the fifth is dropped."""


class StatusSocket:
    """Answers the one-frame request ``status`` with the report as JSON."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], replay: Replay) -> None:
        self.door = open_door(context, replay.directory.endpoints.status_path, _MOST_BYTES, _MOST_UNREAD, _MOST_UNSENT)
        self.socket = self.door.socket
        self._replay = replay
        self._rest_until_s = 0.0
        self._look_at_s = 0.0

    def answer_nowait(self, *, is_busy: bool) -> bool:
        """Answers at most one request; after the time an answer took, rests twenty times as long. True if there may be more to do.

        That time is this thread's own: on a busy machine an answer that was interrupted would silence the socket for seconds.
        A loop that ``is_busy`` looks only every few milliseconds: an empty look costs as much as a tenth of a slot.
        """
        now_s = time.monotonic()
        if now_s < self._rest_until_s or (is_busy and now_s < self._look_at_s):
            return False
        self._look_at_s = now_s + _LOOK_EVERY_S
        received = receive_nowait(self.socket)
        if received is None:
            return False
        began_s = time.thread_time()
        identity, request, extra = received
        if request == b"status" and not extra:
            with contextlib.suppress(zmq.ZMQError):  # it has gone, or never reads: its loss
                self.socket.send_multipart((identity, json.dumps(report(self._replay)).encode()), zmq.NOBLOCK)
        self._rest_until_s = time.monotonic() + _SHARE_OF_TIME * (time.thread_time() - began_s)
        return True

    @property
    def rest_until_s(self) -> float:
        """Until when requests are left in the socket."""
        return self._rest_until_s

    def close(self) -> None:
        self.door.close(linger_ms=0)


def report(replay: Replay) -> dict[str, object]:
    """The status report; status_report.schema.json describes it."""
    store = replay.store
    look = Look(replay, store) if store else None
    rows_per_s, batches_per_s = replay.rates.per_second()
    nothing = {"p50": None, "p99": None}
    return {
        "report_version": REPORT_VERSION,
        "name": replay.directory.endpoints.name,
        "pid": os.getpid(),
        "generation": replay.generation,
        "run_id": replay.config.run_id,
        "options": replay.config.report(),
        "phase": replay.phase_text,
        "uptime_s": time.monotonic() - replay.started_s,
        "device": {"kind": replay.device.kind, "uuid": replay.device.uuid, "name": replay.device.name, "storage": replay.config.storage},
        "schema": None if store is None else _schema(store),
        "ring": None if store is None else _ring(store),
        "ingress": _ingress(replay, store),
        "collectors": [_collector(session, store, look) for session in replay.sessions.of(CollectorSession)],
        "learners": [_learner(session, replay, look) for session in replay.sessions.of(LearnerSession)],
        "observers": [_observer(session, replay) for session in replay.sessions.of(ObserverSession)],
        "flow": _flow(replay, look),
        "rates": {
            "rows_per_s": rows_per_s,
            "bytes_per_s": rows_per_s * (store.schema.stride if store else 0),
            "batches_per_s": batches_per_s,
        },
        "latency": {
            "commit_us": store.ingress.commit_latency.percentiles_us() if store else nothing,
            "grant_us": replay.grant_latency.percentiles_us(),
        },
        "histograms": {
            "commit": (store.ingress.commit_latency if store else Latency()).histogram(),
            "slot_wait": (store.ingress.slot_wait if store else Latency()).histogram(),
            "grant": replay.grant_latency.histogram(),
        },
        "moments": {} if store is None else {tally.field.name: tally.report() for tally in store.tallies},
        "episodes": store.ingress.metadata.episodes.report() if store and store.ingress.metadata.notes.has_episodes else None,
        "staleness": store.ingress.metadata.staleness.report() if store and store.ingress.metadata.notes.has_versions else None,
        "trace": replay.tracing.report(),
        "mailboxes": {"host_bytes": replay.mailboxes.host_bytes, "versions": replay.mailboxes.versions},
        "counters": {
            **asdict(replay.counters),
            "rows_overwritten": store.ring.tail if store else 0,
            "rows_in_flight": store.ingress.waiting_rows + store.ring.in_flight if store else 0,
        },
    }


def _schema(store: Store) -> dict[str, object]:
    fields = [{"name": f.name, "dtype": f.dtype, "shape": list(f.shape), "offset": f.offset, "bytes": f.n_bytes} for f in store.schema]
    return {
        "fields": fields,
        "row_bytes": store.schema.row_bytes,
        "stride_bytes": store.schema.stride,
        "fingerprint": store.schema.fingerprint,
        "roles": dict(store.schema.roles),
        "pairs": dict(store.schema.pairs),
    }


def _ring(store: Store) -> dict[str, object]:
    ring, layout = store.ring, store.plan.layout
    return {
        "capacity_rows": ring.capacity,
        "headroom_rows": ring.headroom,
        "ring_rows": ring.ring_rows,
        "size_rows": ring.size,
        "committed": ring.committed,
        "tail": ring.tail,
        "reserved": ring.reserved,
        "device_bytes": store.memory.device_bytes,
        "host_bytes": store.memory.host_bytes,
        "storage": store.memory.place.storage,
        "columns": list(layout.columns),
        "segments_unlinked": store.memory.place.segments_unlinked,
    }


def _ingress(replay: Replay, store: Store | None) -> dict[str, object]:
    collectors = [session for session in replay.sessions.of(CollectorSession) if session.segment is not None]
    return {
        "slot_rows": store.plan.slot_rows if store else None,
        "slot_bytes": store.plan.slot_bytes if store else None,
        "depth": replay.config.depth,
        "segments": len(collectors),
        "host_bytes": sum(session.segment.n_bytes for session in collectors if session.segment is not None),
        "occupied_slots": store.ingress.waiting_slots + store.ingress.slots_in_flight if store else 0,
        "waiting_slots": store.ingress.waiting_slots if store else 0,
    }


def _collector(session: CollectorSession, store: Store | None, look: Look | None) -> dict[str, object]:
    waiting_on = look.why_no_credit(session) if look else "ring"
    since_ns = store.ingress.blocked_since_ns if store and waiting_on else None
    return {
        "name": session.name,
        "pid": session.hello.pid,
        "state": session.state.value,
        "lanes": session.hello.lanes,
        "counted": session.hello.counted,
        "slot_rows": session.slot_rows,
        "copied_as": session.copied_as,
        "credits": session.credits.outstanding,
        "published_rows": session.published_rows,
        "committed_rows": session.committed_rows,
        "rejected_rows": session.rejected_rows,
        "masked_rows": session.masked_rows,
        "nonfinite_rows": session.nonfinite_rows,
        "last_nonfinite": asdict(session.nonfinite) if session.nonfinite else None,
        "episodes": session.episodes.report() if store and store.ingress.metadata.notes.has_episodes else None,
        "waiting_on": waiting_on,
        "waiting_s": (time.monotonic_ns() - since_ns) / 1e9 if since_ns is not None else 0.0,
    }


def _learner(session: LearnerSession, replay: Replay, look: Look | None) -> dict[str, object]:
    waiting = replay.requests.of(session.token)
    return {
        **_reader(session, replay),
        "batches": session.batches,
        "rows": session.rows,
        "batch_bytes": session.largest_batch_rows * (replay.store.schema.stride if replay.store else 0),
        "dropped": session.dropped,
        "waiting_on": look.why_no_grant(session) if look else "ring",
        "waiting_s": (time.monotonic_ns() - waiting[0].asked_ns) / 1e9 if waiting else 0.0,
    }


def _observer(session: ObserverSession, replay: Replay) -> dict[str, object]:
    return {**_reader(session, replay), "reads": session.reads}


def _reader(session: LearnerSession | ObserverSession, replay: Replay) -> dict[str, object]:
    """What is told of everybody who maps the ring."""
    return {
        "name": session.name,
        "pid": session.hello.pid,
        "state": session.state.value,
        "is_mapped": session.is_proved,
        "transport": session.transport,
        "open_leases": replay.leases.count_of(session.token),
    }


def _flow(replay: Replay, look: Look | None) -> dict[str, object]:
    """Who waits for what, since when, and how long each state lasted."""
    flow, state = replay.flow, flow_state(replay)
    now_ns = time.monotonic_ns()
    replay.flow_clock.tell(state, now_ns)  # a report from between two turns of the loop is true, too
    times = replay.flow_clock.statistics(now_ns)
    return {
        "state": state.value,
        "blocked_side": state.blocked_side,
        "reason": look.why_flow_waits(state) if look else None,
        "since_s": times.since_s,
        "samples_per_insert": flow.ratio,
        "samples_per_insert_target": flow.samples_per_insert,
        "tolerance_rows": flow.tolerance,
        "learning_starts": flow.learning_starts,
        "inserted_rows": flow.inserted,
        "sampled_rows": flow.sampled,
        "time_in_state_s": times.total_s,
        "time_in_state_last_minute_s": times.recent_s,
    }
