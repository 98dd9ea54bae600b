"""Carries publishes from a forwarder's slots to the host of the ring: gathered into chunks, four on their way, again after a failure.

One thread of its own does all the sending. It knows nothing of Ray: ``call`` starts one delivery and returns its future.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from replay_server_protocol.passing import Committed, Passed
from replay_server_protocol.schema import Schema

from replay_server_client.ray.delivery import Chunk, Delivery, Part
from replay_server_client.ray.parcel import Answer, Bytes, Header, Sender, stripped

_LONGEST_SLEEP_S = 0.5


class HostCalls(Protocol):
    """The host of the ring, on whatever node it is."""

    def agree(self, schema: dict[str, object]) -> dict[str, object]:
        """Options of its sidecar, which takes rows of this schema. Waits; raises what it refuses."""

    def deliver(self, headers: Sequence[Header], rows: Bytes, schema: dict[str, object]) -> Future[Answer]:
        """Starts a delivery."""

    def forget(self, origins: Sequence[str]) -> None:
        """Says that these have gone; waits for nothing."""


@dataclass(frozen=True, slots=True)
class CarrierCounts:
    """What a carrier has done. ``failures`` are calls without an answer."""

    chunks: int
    bytes: int
    parts_sent_again: int
    failures: int
    unanswered: int
    last_error: str


class ChunkCarrier:
    """``start`` it before use; ``close`` gives up what is not committed."""

    def __init__(self, host: HostCalls, delivery: Delivery[Passed] | None = None) -> None:
        self.last_error = ""
        self._host = host
        self._delivery = delivery or Delivery()
        self._schema: dict[str, object] = {}
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._committed: deque[Committed] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="carrier", daemon=True)
        self._bytes = self._failures = 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._events.put(None)
        self._thread.join(5)
        os.close(self._wake)

    def agree(self, schema: Schema) -> dict[str, object]:
        self._schema = schema.to_wire()
        return self._host.agree(self._schema)

    def carry(self, passed: Passed) -> None:
        part = Part(passed.origin, passed.number, len(passed.rows), passed)
        self._events.put(lambda: self._delivery.offer(part, time.monotonic()))

    def forget(self, origin: str) -> None:
        self._events.put(lambda: self._forget(origin))

    def fileno(self) -> int:
        return self._wake

    def take_committed(self) -> list[Committed]:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        taken = []
        while self._committed:
            taken.append(self._committed.popleft())
        return taken

    @property
    def is_waiting(self) -> bool:
        """Whether there are publishes without an answer."""
        return self._delivery.unanswered > 0

    def why_waiting(self) -> str:
        error = f"; its last error: {self.last_error}" if self.last_error else ""
        return f"the host of the ring: {self._delivery.in_flight} chunks are on their way{error}"

    def counts(self) -> CarrierCounts:
        delivery = self._delivery
        return CarrierCounts(
            delivery.chunks_sent, self._bytes, delivery.parts_sent_again, self._failures, delivery.unanswered, self.last_error
        )

    def _run(self) -> None:
        while True:
            now_s = time.monotonic()
            while (chunk := self._delivery.next_chunk(now_s)) is not None:
                self._send(chunk)
            wait_s = self._delivery.next_at_s() - now_s
            try:
                event = self._events.get(timeout=wait_s if 0 < wait_s < _LONGEST_SLEEP_S else _LONGEST_SLEEP_S)
                while event is not None:
                    event()
                    event = self._events.get_nowait()
                return
            except queue.Empty:
                pass

    def _send(self, chunk: Chunk[Passed]) -> None:
        headers = [_header(part, chunk.firsts[part.origin]) for part in chunk.parts]
        rows = np.concatenate([part.content.rows for part in chunk.parts])
        self._bytes += len(rows)
        try:
            future = self._host.deliver(headers, rows, self._schema)
        except Exception as error:  # noqa: BLE001 - whatever the transport raises is one failed call
            self._note(error)
            self._events.put(lambda: self._settle(chunk.ordinal, None))
            return
        future.add_done_callback(lambda done: self._events.put(lambda: self._settle(chunk.ordinal, done)))

    def _settle(self, ordinal: int, done: Future[Answer] | None) -> None:
        answer: Answer | None = None
        if done is not None:
            error = done.exception()
            if error is None:
                answer = done.result()
                self.last_error = ""
            else:
                self._note(error)
        through = answer.through if answer is not None else None
        committed: dict[str, int] = {}
        for part in self._delivery.settle(ordinal, through, time.monotonic()):
            committed[part.origin] = max(part.number, committed.get(part.origin, 0))  # one may have been offered twice
        for origin, number in committed.items():
            self._committed.append(Committed(origin, number, answer.committed if answer is not None else 0))
        if committed:
            os.eventfd_write(self._wake, 1)

    def _forget(self, origin: str) -> None:
        self._delivery.forget(origin)
        try:
            self._host.forget([origin])
        except Exception as error:  # noqa: BLE001 - it only spares the host waiting until the origin is idle
            self._note(error)

    def _note(self, error: BaseException) -> None:
        self._failures += 1
        self.last_error = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def _header(part: Part[Passed], first: int) -> Header:
    passed = part.content
    sender = Sender(passed.collector, passed.lanes, passed.counted)
    return Header(part.origin, part.number, first, sender, stripped(passed.publish), part.n_bytes)
