"""The ring as an observer maps it: by numpy alone in host memory, by torch on a GPU; proved as a learner's mapping is."""

from __future__ import annotations

from typing import Protocol

from replay_server_protocol.errors import AttachRefused, ProtocolViolation
from replay_server_protocol.messages import Challenge, Proof, Proved, Refused, RingAt
from replay_server_protocol.schema import Schema
from replay_server_protocol.segment import Segment

from replay_server_client.bounce import Bounce, HostBounce, bounce_bytes
from replay_server_client.connection import Connection, error_of
from replay_server_client.look import Ring

_PROOF_BYTES = 64


class _Mapping(Protocol):
    def read_cell(self, offset: int, n_bytes: int) -> bytes: ...

    def bounce(self, n_bytes: int) -> Bounce: ...

    def close(self) -> None: ...


class ObservedRing:
    """``ring`` and ``bounce`` are None until the mapping is proved, and again once the server is lost."""

    def __init__(self, connection: Connection) -> None:
        self.ring: Ring | None = None
        self.bounce: Bounce | None = None
        self._connection = connection
        self._at: RingAt | None = None
        self._mapping: _Mapping | None = None

    def receive(self, timeout_s: float) -> object:
        """The session's next message, or None; what the server says of the ring is acted on. Raises what a REFUSED carries."""
        message = self._connection.receive(timeout_s)
        match message:
            case Refused():
                raise error_of(message)
            case RingAt():
                if self._mapping is None:
                    with self._connection.opening_memory():
                        self._mapping = _map(message, self._connection.attached_welcome.pid)
                    self._at = message
                self._prove(1)
            case Challenge():
                self._prove(2)
            case Proved() if self._at is not None and self._mapping is not None:
                ring = Ring(self._at, Schema.from_wire(self._at.schema))
                self.bounce = self._mapping.bounce(bounce_bytes(ring.record_bytes))
                self.ring = ring
        return message

    def lose(self) -> bool:
        """Unmaps after ServerGone. True if the session still stood, for the server was about to go: that was told BYE."""
        self.let_go()
        stood = self._connection.is_attached
        if stood:
            self._connection.say_bye()
        return stood

    def let_go(self) -> None:
        """Unmaps, after every copy: a look may have ended in the middle of one."""
        mapping, bounce = self._mapping, self.bounce
        self._mapping, self._at, self.ring, self.bounce = None, None, None, None
        if bounce is not None:
            bounce.finish()
        if mapping is not None:
            mapping.close()

    def _prove(self, step: int) -> None:
        at, mapping, connection = self._at, self._mapping, self._connection
        if at is not None and mapping is not None:
            pattern = mapping.read_cell(at.proof_offset, _PROOF_BYTES)
            connection.send(
                Proof(connection.session, connection.generation, step, pattern, "cuda_ipc" if at.storage == "cuda" else "shared_memory")
            )


class _HostRing:
    def __init__(self, at: RingAt) -> None:
        try:
            name = at.handle.decode("ascii")
        except UnicodeDecodeError as error:
            raise ProtocolViolation("the ring's segment name is not ASCII") from error
        self._segment = Segment.open(name, at.alloc_bytes)

    def read_cell(self, offset: int, n_bytes: int) -> bytes:
        return self._segment.bytes[offset : offset + n_bytes].tobytes()

    def bounce(self, n_bytes: int) -> Bounce:
        return HostBounce(self._segment.bytes, n_bytes)

    def close(self) -> None:
        self._segment.close()


def _map(at: RingAt, server_pid: int) -> _Mapping:
    if at.storage != "cuda":
        return _HostRing(at)
    try:
        from replay_server_client.observed_cuda import CudaRing
    except ImportError as error:
        raise AttachRefused(f"looking at a ring on a GPU needs torch and cuda-bindings ({error}); install replay-server[cuda]") from error
    return CudaRing(at, server_pid)
