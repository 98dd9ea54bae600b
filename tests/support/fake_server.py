"""A server that speaks the protocol and holds no ring: a ROUTER in a thread, told by the test what to hold back, drop or forget."""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import zmq
from replay_server_protocol.codec import client_codec, server_codec
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.messages import (
    Bye,
    ClientMessage,
    Closing,
    Credit,
    Done,
    Explain,
    Hello,
    MailAsk,
    MailLent,
    MailNews,
    MailPost,
    MailSlot,
    MailWritten,
    Mapped,
    Publish,
    Reason,
    Refused,
    SegmentLent,
    ServerMessage,
    Stale,
    Welcome,
)
from replay_server_protocol.schema import Schema
from replay_server_protocol.segment import Segment, align, segment_name

_POLL_MS = 2
_WITHIN_S = 10.0


@dataclass(slots=True)
class Taken:
    """A publish and the rows that lay in its slot when it came."""

    message: Publish
    rows: npt.NDArray[np.uint8]


@dataclass(slots=True)
class FakeServer:
    """Options are read when a client attaches; ``received`` and ``taken`` are read by the test once ``settle`` returned."""

    run_dir: Path
    slot_rows: int = 16
    depth: int = 2
    nonfinite: Literal["reject", "count", "allow"] = "reject"
    moments: tuple[str, ...] = ()
    links: bool = True
    copied_as: str = "memory"
    resumes: bool = False
    holds_credits: bool = False
    lends: bool = True
    refusal: tuple[str, str] | None = None  # code and message instead of a segment
    is_silent: bool = False
    drops: int = 0  # publishes to lose on the way
    name: str = field(default_factory=lambda: f"f{secrets.token_hex(3)}")
    generation: int = 1
    received: list[ClientMessage] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    committed: int = 0
    session: int = 0
    _identity: bytes = b""
    _schema: Schema | None = None
    _segment: Segment | None = None
    _slot_bytes: int = 0
    _segments: list[Segment] = field(default_factory=list)
    _mail: dict[str, tuple[int, Segment, dict[str, object]]] = field(default_factory=dict)
    _posting: tuple[MailPost, Segment] | None = None
    _commands: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    _answer: Callable[[ServerMessage], None] = lambda message: None
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._serve, name="fake server")
        self._thread.start()
        self.settle()
        return self

    def __exit__(self, *_: object) -> None:
        self._commands.put(None)
        assert self._thread is not None
        self._thread.join(_WITHIN_S)
        Endpoints.resolve(self.name, self.run_dir).control_path.unlink(missing_ok=True)
        for segment in self._segments:
            segment.unlink()
            segment.close()

    def do(self, action: Callable[[], None]) -> None:
        """Runs ``action`` in the server's thread, after all messages that have arrived, and waits for it."""
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._commands.put(act)
        assert done.wait(_WITHIN_S)

    def settle(self) -> None:
        self.do(lambda: None)

    def credit(self, most: int | None = None) -> None:
        """Returns every credit held back, or those of the session's first ``most`` publishes."""
        self.do(lambda: self._credit(most))

    def hold_no_more(self) -> None:
        self.holds_credits = False
        self.credit()

    def close_in_good_order(self) -> None:
        self.do(lambda: self._answer(Closing(self.session, self.generation, 10**9)))

    def restart(self) -> None:
        """Forgets the session: the client's next message is answered by STALE, and no credit comes back."""

        def forget() -> None:
            self.generation += 1
            self._answer(Stale(self.session, self.generation))
            self.session, self.committed, self._mail = 0, 0, {}

        self.do(forget)

    def mail(self, name: str, manifest: dict[str, object], packed: npt.NDArray[np.uint8]) -> None:
        """Makes a new version of a mailbox and tells the client."""
        segment = self._create(len(packed))
        segment.bytes[:] = packed

        def post() -> None:
            self._post(name, segment, manifest)

        self.do(post)

    def of(self, kind: type[ClientMessage]) -> list[ClientMessage]:
        self.settle()
        return [message for message in self.received if type(message) is kind]

    def rows(self, name: str) -> npt.NDArray[np.generic]:
        """The field of all rows taken, in order."""
        self.settle()
        assert self._schema is not None
        rows = np.concatenate([taken.rows for taken in self.taken])
        return self._schema[name].view(rows)

    def _serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(Endpoints.resolve(self.name, self.run_dir).control)

            def answer(message: ServerMessage) -> None:
                socket.send_multipart((self._identity, server_codec.encode(message)))

            self._answer = answer
            while True:
                while socket.poll(_POLL_MS):
                    identity, packed = socket.recv_multipart()
                    if not self.is_silent:
                        self._take(identity, client_codec.decode(packed))
                try:
                    command = self._commands.get_nowait()
                except queue.Empty:
                    continue
                if command is None:
                    return
                command()

    def _take(self, identity: bytes, message: ClientMessage) -> None:
        self.received.append(message)
        self._identity = identity
        if isinstance(message, Hello):
            self._greet(message)
            return
        if (message.session, message.generation) != (self.session, self.generation):
            self._answer(Stale(message.session, self.generation))
            return
        match message:
            case Mapped():
                assert self._segment is not None
                self._segment.unlink()
            case Publish():
                self._publish(message)
            case Explain():
                self._answer(Reason(self.session, self.generation, message.what, "the test holds it back"))
            case MailAsk():
                version, segment, manifest = self._mail.get(message.name, (0, None, {}))
                if segment is None or version <= message.newer_than:
                    self._answer(MailLent(self.session, self.generation, message.name, 0, "", 0, {}))
                else:
                    self._answer(MailLent(self.session, self.generation, message.name, version, segment.name, segment.n_bytes, manifest))
            case MailPost():
                segment = self._create(message.n_bytes)
                self._posting = message, segment
                self._answer(MailSlot(self.session, self.generation, message.number, segment.name, segment.n_bytes))
            case MailWritten():
                assert self._posting is not None
                post, segment = self._posting
                self._answer(Done(self.session, self.generation, message.number, self._post(post.name, segment, post.manifest)))
            case Bye():
                self.session = 0
            case _:
                pass

    def _greet(self, hello: Hello) -> None:
        self.session = self.session + 1 if self.session else secrets.randbelow(2**40) + 1
        start_ticks = 0  # unknown: the client doesn't watch this process, which is its own
        self._answer(
            Welcome(
                self.session, self.generation, hello.nonce, time.monotonic_ns(), os.getpid(), start_ticks, "fake", "serving", 0, 0, 10**9
            )
        )
        if self.refusal is not None:
            self._answer(Refused(self.session, self.generation, "hello", 0, 0, *self.refusal, {}))
        elif self.lends and hello.schema is not None:
            self._lend(Schema.from_wire(hello.schema))

    def _lend(self, schema: Schema) -> None:
        self._schema, self._slot_bytes = schema, align(self.slot_rows * schema.stride)
        self._segment = self._create(self.depth * self._slot_bytes)
        self._answer(
            SegmentLent(
                self.session,
                self.generation,
                self._segment.name,
                self.depth,
                self.slot_rows,
                self._slot_bytes,
                schema.to_wire(),
                list(self.moments),
                self.nonfinite,
                self.links,
                copied_as=self.copied_as,
                resumes=self.resumes,
            )
        )

    def _publish(self, message: Publish) -> None:
        if self.drops:
            self.drops -= 1
            return
        newest = max((t.message.number for t in self.taken if t.message.session == self.session), default=0)
        if message.number == newest + 1:
            assert self._segment is not None
            assert self._schema is not None
            start, n_bytes = message.slot * self._slot_bytes, message.rows * self._schema.stride
            rows = self._segment.bytes[start : start + n_bytes].reshape(message.rows, self._schema.stride).copy()
            self.taken.append(Taken(message, rows))
        if not self.holds_credits:
            self._credit()

    def _credit(self, most: int | None = None) -> None:
        of_session = [t.message for t in self.taken if t.message.session == self.session][:most]
        if of_session:
            self.committed = sum(message.rows for message in of_session)
            self._answer(Credit(self.session, self.generation, of_session[-1].number, self.committed))

    def _create(self, n_bytes: int) -> Segment:
        self._segments.append(Segment.create(segment_name("fake", secrets.token_hex(4)), n_bytes))
        return self._segments[-1]

    def _post(self, name: str, segment: Segment, manifest: dict[str, object]) -> int:
        version, _, _ = self._mail.get(name, (0, None, {}))
        self._mail[name] = version + 1, segment, manifest
        self._answer(MailNews(self.session, self.generation, name, version + 1))
        return version + 1
