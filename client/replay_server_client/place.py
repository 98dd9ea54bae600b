"""One batch buffer of a sampler, with the request it holds or waits for."""

from __future__ import annotations

from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import Grant
from replay_server_protocol.states import BUFFER, BufferEvent, BufferState, move

from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.gather import Gather


class Place:
    """One batch buffer with its gather, its state, and the request it holds or waits for."""

    __slots__ = (
        "asked_committed",
        "asked_ns",
        "committed",
        "gather",
        "grant",
        "is_ahead",
        "memory",
        "number",
        "seen",
        "state",
        "submitted_ns",
    )

    def __init__(self, memory: BatchBuffer, gather: Gather, number: int) -> None:
        self.memory = memory
        self.gather = gather
        self.number = number
        self.state = BufferState.FREE
        self.grant: Grant | None = None
        self.committed = 0
        self.asked_ns = 0
        self.asked_committed = 0
        self.is_ahead = False  # asked for rows that were not committed yet, as far as was known
        self.submitted_ns = 0
        self.seen = (0, 0, 0)  # generation, session and lease of the newest grant that came, taken or not

    def happen(self, event: BufferEvent) -> None:
        self.state = move(BUFFER, self.state, event)

    def has_had(self, grant: Grant) -> bool:
        """Notes ``grant``, and tells whether it came before: repeated like its request, whether it was taken then or given back.

        A lease that was given back must not be gathered under. Leases come in the order of their numbers, anew in each generation.
        """
        generation, session, newest = self.seen
        if (generation, session) == (grant.generation, grant.session) and grant.lease <= newest:
            return True
        self.seen = grant.generation, grant.session, grant.lease
        return False

    def granted(self) -> Grant:
        if self.grant is None:
            raise ProtocolViolation(f"batch buffer {self.memory.number} is {self.state.value} without a grant")
        return self.grant
