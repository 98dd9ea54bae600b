"""The ring of one generation, from RING to PROVED: mapped, read back twice as the server asks, unmapped when the server is lost."""

from __future__ import annotations

from replay_server_protocol.errors import ReplayError, ServerGone
from replay_server_protocol.messages import Proof, RingAt
from replay_server_protocol.schema import Schema

from replay_server_client.connection import Connection
from replay_server_client.mapping import PROOF_BYTES, Ring, map_ring


class ProvenRing:
    """``ring`` is None until the mapping is proved. ``refusal`` says why it can't be, and stands until the next session."""

    def __init__(self, connection: Connection, device: str, expected: Schema | None, *, require_zero_copy: bool = False) -> None:
        self.ring: Ring | None = None
        self.refusal: ReplayError | None = None
        self._connection = connection
        self._device = device
        self._expected = expected
        self._require_zero_copy = require_zero_copy
        self._mapped: Ring | None = None

    def place(self, at: RingAt) -> None:
        """The server said where the ring is; a repeat of that only repeats the proof."""
        if self._mapped is None:
            try:
                with self._connection.opening_memory():
                    server_pid = self._connection.attached_welcome.pid
                    self._mapped = map_ring(at, self._device, server_pid, self._expected, require_zero_copy=self._require_zero_copy)
            except ServerGone:
                raise
            except ReplayError as error:
                self.refusal = error
                return
        self.prove(1)

    def prove(self, step: int) -> None:
        """Sends the pattern that the mapping shows in the proof cell."""
        mapped, connection = self._mapped, self._connection
        if mapped is not None:
            pattern = mapped.mapping.read_cell(mapped.at.proof_offset, PROOF_BYTES)
            connection.send(Proof(connection.session, connection.generation, step, pattern, mapped.transport))

    def accept(self) -> None:
        """Both patterns were right."""
        self.ring = self._mapped

    def let_go(self) -> None:
        """Unmaps. Whatever reads the ring must be done and every view of it dropped."""
        mapped, self._mapped, self.ring, self.refusal = self._mapped, None, None, None
        if mapped is not None:
            mapped.mapping.close()
