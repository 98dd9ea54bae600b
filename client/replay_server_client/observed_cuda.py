"""A ring on a GPU as an observer maps it: opened as a learner opens it."""

from __future__ import annotations

from replay_server_protocol.messages import RingAt

from replay_server_client.bounce import Bounce
from replay_server_client.bounce_cuda import CudaBounce
from replay_server_client.mapping import map_ring


class CudaRing:
    def __init__(self, at: RingAt, server_pid: int) -> None:
        self._mapping = map_ring(at, "cuda", server_pid, None).mapping

    def read_cell(self, offset: int, n_bytes: int) -> bytes:
        return self._mapping.read_cell(offset, n_bytes)

    def bounce(self, n_bytes: int) -> Bounce:
        return CudaBounce(self._mapping.allocation, n_bytes)

    def close(self) -> None:
        self._mapping.close()
