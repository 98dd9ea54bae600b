"""The ring shown to those that map it: where it lies, and the proof that they read what the server wrote.

```
show ─► pattern 1 written ─► RING_AT ─► PROOF 1 ─► pattern 2 written ─► CHALLENGE ─► PROOF 2 ─► PROVED
```
"""

from __future__ import annotations

import platform
import secrets
from collections.abc import Callable

from replay_server_protocol.errors import AttachRefused, ReplayError, SchemaMismatch
from replay_server_protocol.messages import Challenge, Proof, Proved, RingAt
from replay_server_protocol.schema import Schema
from replay_server_protocol.segment import segment_dir
from replay_server_protocol.states import SessionEvent, SessionState

from replay_server.replay import Replay, Store
from replay_server.run_directory import RingHolder
from replay_server.sessions import MappingSession, Session
from replay_server.storage import PROOF_BYTES


class Showing:
    """Of one server. ``refuse(session, about, error)`` ends a session that can't go on."""

    def __init__(self, replay: Replay, refuse: Callable[[Session, str, ReplayError], None]) -> None:
        self._replay = replay
        self._refuse = refuse
        self._shown = 0

    def show(self, session: MappingSession) -> None:
        """Tells where the ring lies, once the first pattern is in it. Refuses who expects another schema, or could not open it."""
        store = self._replay.store
        if store is None or session.proof_step:
            return
        if session.hello.schema is not None:
            try:
                different = store.schema.differences(Schema.from_wire(session.hello.schema))
            except SchemaMismatch as error:
                different = str(error)
            if different:
                mismatch = SchemaMismatch(f"the {session.hello.role} expects another schema than the ring's: {different}")
                self._refuse(session, "Hello", mismatch)
                return
        if store.memory.place.segments_unlinked:
            self._refuse(session, "Hello", AttachRefused(why_unlinked(store)))
            return
        session.proof_step, session.proof_number = 1, self._shown
        self._shown += 1
        self._write_pattern(session, store)

    def prove(self, session: MappingSession, proof: Proof) -> None:
        """Checks a pattern read back; a second one follows the first, so that a stale or lucky mapping is found out."""
        store = self._replay.store
        if store is None or session.pattern is None or proof.step != session.proof_step:
            return
        if proof.pattern != session.pattern:
            error = AttachRefused(
                f"{session.hello.role} {session.name!r} maps the ring but reads other bytes than the server wrote: "
                f"shared {store.memory.place.storage} memory doesn't work between these two processes on "
                f"{platform.system()} {platform.release()} (containers, WSL and virtual machines can do this); use --storage host or "
                "--device cpu"
            )
            self._refuse(session, "Proof", error)
            return
        session.proof_step, session.transport = session.proof_step + 1, proof.transport
        if session.is_proved:
            session.happen(SessionEvent.MAPPED)
            self.note_holders()
            self._replay.send(session, Proved(session.token, self._replay.generation))
        else:
            self._write_pattern(session, store)

    def note_holders(self) -> None:
        """Writes down who maps the ring, for the next server of this name."""
        proved = [learner for learner in self._replay.sessions.of(MappingSession) if learner.is_proved]
        holders = [RingHolder(s.hello.pid, s.hello.start_ticks, s.name, self._replay.generation) for s in proved]
        self._replay.directory.note_holders([*holders, *self._replay.directory.living_earlier_holders()])

    def _write_pattern(self, session: MappingSession, store: Store) -> None:
        pattern = secrets.token_bytes(PROOF_BYTES)

        def tell() -> None:
            session.pattern = pattern
            if session.state is not SessionState.ENDED:
                is_first = session.proof_step == 1
                self._replay.send(session, self._ring_at(session, store) if is_first else Challenge(session.token, self._replay.generation))

        store.ingress.write(store.plan.layout.proof_cell(session.proof_number), pattern, tell)

    def _ring_at(self, session: MappingSession, store: Store) -> RingAt:
        place, layout = store.memory.place, store.plan.layout
        return RingAt(
            session.token,
            self._replay.generation,
            place.storage,
            place.handle,
            place.device_uuid,
            place.alloc_bytes,
            store.ring.ring_rows,
            store.ring.capacity,
            store.schema.to_wire(),
            layout.link,
            layout.priority,
            layout.overlay,
            layout.proof_cell(session.proof_number),
        )


def why_unlinked(store: Store) -> str:
    """For people, of a ring whose name is gone while it is mapped."""
    return (
        f"the ring's segment {store.memory.place.handle.decode()} was removed from {segment_dir()} while the server runs: "
        "who has mapped it goes on, nobody else can map it; restart the server. "
        "systemd-logind removes such files when their user logs out (RemoveIPC=yes): serve as a system user, or set RemoveIPC=no"
    )
