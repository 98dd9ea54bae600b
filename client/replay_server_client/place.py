"""One batch buffer of a sampler, with the request it holds or waits for."""

from __future__ import annotations

from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import Grant
from replay_server_protocol.states import BUFFER, BufferEvent, BufferState, move

from replay_server_client.batch import BatchBuffer
from replay_server_client.gather import Gather


class Place:
    """One batch buffer with its gather, its state, and the request it holds or waits for."""

    __slots__ = ("asked_committed", "asked_ns", "committed", "gather", "grant", "memory", "number", "state", "submitted_ns")

    def __init__(self, memory: BatchBuffer, gather: Gather, number: int) -> None:
        self.memory = memory
        self.gather = gather
        self.number = number
        self.state = BufferState.FREE
        self.grant: Grant | None = None
        self.committed = 0
        self.asked_ns = 0
        self.asked_committed = 0
        self.submitted_ns = 0

    def happen(self, event: BufferEvent) -> None:
        self.state = move(BUFFER, self.state, event)

    def has_had(self, grant: Grant) -> bool:
        """Whether ``grant`` is a repeat of this place's last one. Lease numbers start again with each generation."""
        last = self.grant
        return last is not None and (last.lease, last.generation, last.session) == (grant.lease, grant.generation, grant.session)

    def granted(self) -> Grant:
        if self.grant is None:
            raise ProtocolViolation(f"batch buffer {self.memory.number} is {self.state.value} without a grant")
        return self.grant
