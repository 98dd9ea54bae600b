"""The server's state beside the ring, as plain numbers of one moment, and a server that goes on from them.

Only what is committed counts: rows on their way die with their server, and their collectors report them as lost to its successor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from replay_server_protocol.errors import InvalidRequest, ProtocolViolation
from replay_server_protocol.messages import Captured

from replay_server.config import KEPT_OPTIONS
from replay_server.counters import Counters
from replay_server.replay import Replay, Store
from replay_server.sessions import CollectorSession

log = logging.getLogger("replay_server")

MOST_MOMENTS_BYTES = 2 << 20
"""Of all fields together in one message; moments of fields beyond it are left out, and that is told."""


def capture(replay: Replay, store: Store, session: int, number: int) -> Captured:
    """The window and all that belongs to it."""
    names, moments = _moments(store)
    state: dict[str, object] = {
        "options": options_of(replay),
        "ring_rows": store.ring.ring_rows,
        "schema": store.schema.to_wire(),
        "fingerprint": store.schema.fingerprint,
        "columns": list(store.plan.layout.columns),
        "counters": _counters(replay.counters),
        "flow": _flow(replay),
        "episodes": store.ingress.metadata.episodes.parts,
        "staleness": store.ingress.metadata.staleness.parts,
        "moments": names,
        "origins": store.ingress.committed_origins.parts,
        "collectors": [[c.name, c.hello.lanes, c.committed_rows] for c in replay.sessions.of(CollectorSession)],
        "run_id": replay.directory.run_id,
        "generation": replay.generation,
    }
    return Captured(session, replay.generation, number, store.ring.tail, store.ring.committed, state, moments)


def options_of(replay: Replay) -> dict[str, object]:
    """The options a restored server begins with: what they are by now, where they can be set on a running server."""
    config, store, flow = replay.config, replay.store, replay.flow
    found = {name: getattr(config, name) for name in KEPT_OPTIONS}
    if store is not None:
        found["capacity"] = store.ring.capacity
    found["samples_per_insert"] = flow.samples_per_insert
    found["tolerance"] = flow.tolerance if flow.samples_per_insert is not None else config.tolerance
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def restore_state(replay: Replay, store: Store, state: Mapping[str, Any], moments: Mapping[str, bytes]) -> None:
    """Makes sums, flow control and moments go on from ``state``. Raises InvalidRequest when it isn't one."""
    try:
        for field in fields(Counters):
            setattr(replay.counters, field.name, int(state["counters"][field.name]) + getattr(replay.counters, field.name))
        _restore_flow(replay, state["flow"])
        store.ingress.metadata.episodes.restore(state["episodes"])
        store.ingress.metadata.staleness.restore(state["staleness"])
        store.ingress.restore_origins(dict(state.get("origins", {})))
        for tally in store.tallies:
            if tally.field.name in moments:
                tally.merge(tally.read(moments[tally.field.name]))
    except (KeyError, TypeError, ValueError, OverflowError, ProtocolViolation) as error:
        raise InvalidRequest(f"the snapshot's state can't be read: {type(error).__name__}: {error}") from error


def _counters(counters: Counters) -> dict[str, object]:
    found = asdict(counters)
    found["rows_published"] = counters.rows_committed + counters.rows_rejected + counters.rows_lost
    return found


def _flow(replay: Replay) -> dict[str, object]:
    flow = replay.flow
    return {
        "inserted": flow.inserted - flow.arriving,
        "sampled": flow.sampled,
        "free_rows": flow.free_rows,
        "learning_starts": flow.learning_starts,
        "samples_per_insert": flow.samples_per_insert,
    }


def _restore_flow(replay: Replay, found: Mapping[str, Any]) -> None:
    """Rows that came before learning starts came; with another ratio the sums begin anew, as when it is set on a running server."""
    flow = replay.flow
    came = int(found["learning_starts"]) - int(found["free_rows"])
    is_same = found["samples_per_insert"] == flow.samples_per_insert
    inserted, sampled = (int(found["inserted"]), int(found["sampled"])) if is_same else (0, 0)
    flow.restore(inserted, sampled, max(0, flow.learning_starts - came))


def _moments(store: Store) -> tuple[list[str], list[bytes]]:
    names: list[str] = []
    moments: list[bytes] = []
    for tally in store.tallies:
        packed = tally.pack()
        if sum(map(len, moments)) + len(packed) > MOST_MOMENTS_BYTES:
            log.warning("moments of %s are too large to be captured: a restored server begins them anew", tally.field.name)
            continue
        names.append(tally.field.name)
        moments.append(packed)
    return names, moments


def kept_moments(names: object, moments: Sequence[bytes]) -> dict[str, bytes]:
    """Moments by the name of their field, as ``Captured`` brings them."""
    return dict(zip(names, moments, strict=True)) if isinstance(names, list) else {}
