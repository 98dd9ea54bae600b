"""Clients that speak the protocol by hand: they may be late, wrong, deaf or mad, as a test wants them. No torch."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
import zmq
from replay_server_client.connection import Connection
from replay_server_client.deadline import Deadline
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.messages import (
    PROTOCOL_VERSION,
    Challenge,
    Credit,
    Grant,
    Hello,
    Mapped,
    Proof,
    Proved,
    Publish,
    Refused,
    Release,
    RingAt,
    Sample,
    SegmentLent,
    ServerMessage,
)
from replay_server_protocol.process import ProcessIdentity, pid_namespace
from replay_server_protocol.schema import Schema
from replay_server_protocol.segment import Segment

M = TypeVar("M")
_WITHIN_S = 10.0


class RawClient:
    """A session by hand; leaving the ``with`` block says BYE. Keywords of the constructor replace fields of its HELLO."""

    def __init__(self, endpoints: Endpoints, role: Literal["collector", "learner", "admin", "observer"], **hello: Any) -> None:
        self._changes = {"role": role, **hello}
        self.connection = Connection(endpoints, self._hello)
        try:
            self.welcome = self.connection.attach(Deadline(_WITHIN_S))
        except BaseException:
            self.connection.close()
            raise

    def send(self, kind: Any, *values: object) -> None:
        """Sends ``kind(session, generation, *values)``."""
        self.connection.send(kind(self.connection.session, self.connection.generation, *values))

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For frames of any kind."""
        return self.connection._connected()

    def receive(self, kind: type[M], timeout_s: float = _WITHIN_S) -> M:
        """The next message of ``kind``; others are passed over, a REFUSED that is not asked for fails the test."""
        end = time.monotonic() + timeout_s
        while (message := self.connection.receive(max(0.0, end - time.monotonic()))) is not None:
            if isinstance(message, kind):
                return message
            assert not isinstance(message, Refused), f"refused: {message.message}"
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s")

    def receive_nothing(self, kind: type[ServerMessage], within_s: float) -> None:
        """Returns when ``within_s`` has passed without a message of ``kind``."""
        end = time.monotonic() + within_s
        while (left := end - time.monotonic()) > 0:
            assert not isinstance(self.connection.receive(left), kind)

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _hello(self, nonce: int) -> Hello:
        me = ProcessIdentity.current()
        values: dict[str, Any] = {
            "version": PROTOCOL_VERSION,
            "nonce": nonce,
            "role": "learner",
            "name": "",
            "pid": me.pid,
            "start_ticks": me.start_ticks,
            "pid_namespace": pid_namespace(),
            "run_id": None,
            "schema": None,
            "lanes": 0,
            "counted": True,
            "rows_lost": 0,
            "device_uuid": None,
        }
        return Hello(**{**values, **self._changes})


class RawCollector(RawClient):
    """A collector with its slots mapped; numbers and slots are the test's."""

    def __init__(self, endpoints: Endpoints, schema: Schema, lanes: int = 1, **hello: Any) -> None:
        super().__init__(endpoints, "collector", schema=schema.to_wire(), lanes=lanes, **hello)
        self.schema = schema
        self.lent = self.receive(SegmentLent)
        self._segment = Segment.open(self.lent.segment, self.lent.depth * self.lent.slot_bytes)
        self.send(Mapped)

    def slot(self, slot: int) -> npt.NDArray[np.uint8]:
        """The rows of a slot, ``uint8[slot_rows, stride]``."""
        start = slot * self.lent.slot_bytes
        return self._segment.bytes[start : start + self.lent.slot_rows * self.schema.stride].reshape(-1, self.schema.stride)

    def fill(self, slot: int, name: str, values: npt.ArrayLike) -> None:
        """Writes leading rows of one field."""
        array = np.asarray(values)
        self.schema[name].view(self.slot(slot))[: len(array)] = array

    def publish(self, number: int, slot: int, rows: int, *, rejected: int = 0, lanes: bytes = b"", moments: tuple[bytes, ...] = ()) -> None:
        self.send(Publish, number, slot, rows, 0, rejected, 0, lanes, list(moments))

    def wait_credit(self, number: int) -> Credit:
        while (credit := self.receive(Credit)).number < number:
            pass
        return credit

    def close(self) -> None:
        segment = getattr(self, "_segment", None)
        if segment is not None:
            segment.close()
        super().close()


class RawLearner(RawClient):
    """A learner with its mapping proved, that reads the ring's rows itself."""

    def __init__(self, endpoints: Endpoints, role: Literal["learner", "observer"] = "learner", **hello: Any) -> None:
        super().__init__(endpoints, role, **hello)
        self.at = self.receive(RingAt)
        self.schema = Schema.from_wire(self.at.schema)
        self._segment = Segment.open(self.at.handle.decode(), self.at.alloc_bytes)
        self.send(Proof, 1, self._cell())
        self.receive(Challenge)
        self.send(Proof, 2, self._cell())
        self.receive(Proved)

    def ask(self, number: int, rows: int = 1, *, sampler: int = 0, min_committed: int = 0, max_age_rows: int | None = None) -> None:
        self.send(Sample, sampler, number, rows, min_committed, max_age_rows)

    def grant(self, number: int, rows: int = 1, *, min_committed: int = 0) -> Grant:
        self.ask(number, rows, min_committed=min_committed)
        return self.receive(Grant)

    def release(self, grant: Grant, *, is_used: bool = True) -> None:
        self.send(Release, grant.lease, is_used)

    def read(self, name: str, first_seq: int, end_seq: int) -> npt.NDArray[np.generic]:
        """A copy of one field of the rows [first_seq, end_seq), whatever lies there now."""
        rows = self._segment.bytes[: self.at.ring_rows * self.schema.stride].reshape(self.at.ring_rows, self.schema.stride)
        return self.schema[name].view(rows[np.arange(first_seq, end_seq) % self.at.ring_rows])

    def read_links(self, first_seq: int, end_seq: int) -> npt.NDArray[np.int64]:
        assert self.at.link_offset is not None
        column = self._segment.bytes[self.at.link_offset :][: 8 * self.at.ring_rows].view(np.int64)
        return column[np.arange(first_seq, end_seq) % self.at.ring_rows]

    def window(self, number: int, name: str, *, min_committed: int = 0) -> tuple[Grant, npt.NDArray[np.generic]]:
        """One field of everything that can be sampled now, read under a lease and released."""
        grant = self.grant(number, min_committed=min_committed)
        values = self.read(name, grant.tail, grant.committed)
        assert time.monotonic_ns() <= grant.deadline_ns, "this machine is too slow for the lease"
        self.release(grant)
        return grant, values

    def close(self) -> None:
        segment = getattr(self, "_segment", None)
        if segment is not None:
            segment.close()
        super().close()

    def _cell(self) -> bytes:
        return bytes(self._segment.bytes[self.at.proof_offset : self.at.proof_offset + 64])
