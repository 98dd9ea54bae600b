"""One client's session with the server: attach, send, receive, and notice within a wait that the server is gone.

Used by one thread at a time (the learner's two take turns under a lock). Sleeping touches no ZeroMQ state: ``sleep`` waits on plain
file descriptors after the socket was read empty, so another thread may use the socket meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import zmq
from replay_server_protocol import errors
from replay_server_protocol.codec import client_codec, server_codec
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import (
    AttachRefused,
    BudgetExceeded,
    ForkedClient,
    InvalidRequest,
    ReplayError,
    ServerClosing,
    ServerGone,
)
from replay_server_protocol.messages import (
    MAX_MESSAGE_BYTES,
    Bye,
    ClientMessage,
    Closing,
    Hello,
    Ping,
    Refused,
    ServerMessage,
    Stale,
    TraceOff,
    TraceOn,
    Welcome,
)
from replay_server_protocol.process import ProcessIdentity, can_start_threads
from replay_server_protocol.trace import Trace

from replay_server_client.deadline import Deadline
from replay_server_client.live_trace import LiveTrace
from replay_server_client.server_watch import ServerWatch
from replay_server_client.silence import SilenceLog, why_nobody_answers, why_silent
from replay_server_client.turn import Turn

_HELLO_AGAIN_S = 1.0
_DESCRIPTORS = 16
_THREADS = 2
_POLLIN = int(zmq.POLLIN)
_FOLLOWS_ITS_MEMORY_S = 0.25
_LONGEST_SLEEP_S = 0.5
"""Also bounds how late Ctrl-C is noticed where a signal does not interrupt the sleep."""


class Connection:
    """A session over one DEALER socket.

    ``hello`` makes the HELLO of each attach from a nonce, so that a client can say what it holds by then. After ``attach`` the
    session's ``welcome`` is set; it is None before that and after the server was lost. ``trace`` is where to record what is done, None
    while nobody wants it: the client's own, or one that the operator has switched on.
    """

    trace: Trace | None = None

    def __init__(self, endpoints: Endpoints, hello: Callable[[int], Hello], trace: Trace | None = None, process: str = "client") -> None:
        self.endpoints = endpoints
        self.welcome: Welcome | None = None
        self.trace = trace
        self.turn = Turn(process)
        self.silence = SilenceLog(process)
        self._live = LiveTrace(trace, process, endpoints.run_dir)
        check_descriptors()
        check_threads()
        self._hello = hello
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._socket_fd: int | None = None
        self._server = ServerWatch()

    @property
    def session(self) -> int:
        return self._welcomed().session

    @property
    def generation(self) -> int:
        return self._welcomed().generation

    @property
    def attached_welcome(self) -> Welcome:
        """``welcome``; raises ServerGone when there is none."""
        return self._welcomed()

    @property
    def is_attached(self) -> bool:
        return self.welcome is not None

    def has_server_ended(self) -> bool:
        """Whether the server's process is known to be gone, without reading the socket; a microsecond."""
        return self._server.has_ended()

    def why_silent(self) -> str:
        """What can be seen of a server that does not answer, for the text of an error."""
        welcome = self.welcome
        if welcome is None:
            return f"server {self.endpoints.name!r} is lost and no other has taken its place; see its log"
        return why_silent(self.endpoints.name, ProcessIdentity(welcome.pid, welcome.start_ticks))

    def check_process(self) -> None:
        """Raises ForkedClient in a forked child: its copy of the socket and of the mappings belongs to the parent."""
        if os.getpid() != self._pid:
            raise ForkedClient(f"this client was made in process {self._pid} and is used in its forked child {os.getpid()}; connect there")

    def check_caller(self) -> None:
        """As ``check_process``. Raises InvalidRequest while another thread waits in this client: sockets and slots belong to one."""
        self.check_process()
        self.turn.check()

    def waiting(self) -> AbstractContextManager[None]:
        """The calling thread waits in this client in the block; ``check_caller`` refuses others."""
        return self.turn.taken()

    def calling(self) -> AbstractContextManager[None]:
        """``check_caller`` before a block that is one call as a whole, whatever lies between its waits. Refuses also once it is closed."""
        self.check_process()
        if self._context.closed:
            raise InvalidRequest(f"{self.turn.who} is closed; connect again")
        return self.turn.taken()

    def attach(self, deadline: Deadline) -> Welcome:
        """Opens a session. Waits for a server until the deadline.

        Raises ServerGone if none answered, AttachRefused (or the server's typed error) if it refused, AttachRefused if the two
        processes don't read one clock: a lease's deadline would mean nothing.
        """
        self.check_process()
        self.detach()
        nonce = secrets.randbelow(2**63 - 1) + 1
        before_ns = time.monotonic_ns()
        self._open_socket()
        hello = self._hello(nonce)
        with self.waiting():
            answer, trace_on = self._greet(hello, deadline)
        after_ns = time.monotonic_ns()
        if isinstance(answer, Refused):
            self.detach()
            raise error_of(answer)
        if hello.role in ("learner", "observer") and not before_ns <= answer.monotonic_ns <= after_ns:
            self.detach()
            raise AttachRefused(
                f"server {self.endpoints.name!r} reads another monotonic clock ({answer.monotonic_ns} ns, here {before_ns} to {after_ns}): "
                "leases can't be timed across time namespaces or virtual machines; run both under one kernel clock"
            )
        self.welcome = answer
        self._server.watch(ProcessIdentity(answer.pid, answer.start_ticks))
        if trace_on is not None and self._is_mine(trace_on):
            self._take_trace(trace_on)
        return answer

    def send(self, message: ClientMessage) -> None:
        """Queues a message; never waits. A full queue means that the server has not read for long: ServerGone."""
        socket = self._connected()
        try:
            socket.send(client_codec.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise self._lost(f"server {self.endpoints.name!r} has not read its socket for a long time") from error

    def receive_nowait(self) -> ServerMessage | None:
        """The next message of this session, or None.

        Raises ServerGone (the session is forgotten) when the server died or restarted, ServerClosing (the session still stands: let go
        of its memory, then ``say_bye``) when it stops in good order.
        """
        socket = self._connected()
        while True:
            try:  # looked first: to see Again raised costs more
                has_message = socket.getsockopt(zmq.EVENTS) & _POLLIN  # type: ignore[operator]  # an int's answer is an int
                packed = socket.recv(zmq.NOBLOCK) if has_message else None
            except zmq.ZMQError as error:  # closed by a call that a signal handler ended in the middle of leaving a lost server
                raise self._lost(f"not attached to server {self.endpoints.name!r}") from error
            if packed is None:
                if self._server.is_seen_ended():
                    raise self._lost(f"server {self.endpoints.name!r} (pid {self._welcomed().pid}) ended without a word")
                return None
            message = server_codec.decode(packed)
            self.silence.heard()
            if isinstance(message, Closing) and self._is_mine(message):
                self._forget_trace()
                raise ServerClosing(f"server {self.endpoints.name!r} is closing in good order")
            if isinstance(message, Stale):
                raise self._lost(f"server {self.endpoints.name!r} restarted: generation {message.generation} does not know this session")
            if not self._is_mine(message):
                continue
            if isinstance(message, TraceOn | TraceOff):
                self._take_trace(message)
            elif not isinstance(message, Ping):
                return message

    def receive(self, timeout_s: float) -> ServerMessage | None:
        """As ``receive_nowait``, after waiting up to ``timeout_s`` for a message."""
        end = time.monotonic() + timeout_s
        while True:
            message = self.receive_nowait()
            left = end - time.monotonic()
            if message is not None or left <= 0:
                return message
            self.sleep(left)

    @contextlib.contextmanager
    def opening_memory(self) -> Iterator[None]:
        """For opening what a message of this session names. Raises ServerGone if it went with its server, or the server is about to go.

        Such a message may be read long after it was sent: a client that was stopped finds it, and by then a successor has swept.
        """
        try:
            yield
        except ServerGone:
            raise
        except ReplayError as error:
            if not self._server.has_ended(_FOLLOWS_ITS_MEMORY_S):
                raise
            raise self._lost(f"server {self.endpoints.name!r} has ended, and the memory it told of went with it") from error

    def sleep(self, timeout_s: float, also: Iterable[int] = (), spin_s: float = 0.0) -> None:
        """Waits until a message may be there, the server died, or one of ``also`` (file descriptors) is readable; at most half a second.

        Only after the socket was read empty: its descriptor signals changes, not contents. Spins for ``spin_s`` before it sleeps, letting
        other threads run.
        """
        poll = select.poll()
        for fd in (self._socket_fd, self._server.pidfd, *also):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        left_s = min(timeout_s, _LONGEST_SLEEP_S)
        spin_until_s = time.monotonic() + min(left_s, spin_s)
        while spin_s and time.monotonic() < spin_until_s:
            if poll.poll(0):
                left_s = 0.0
                break
            time.sleep(0)
        poll.poll(left_s * 1000)
        self._server.look_at_once()

    def detach(self) -> None:
        """Forgets the session and closes its socket, without a word."""
        self._forget_trace()
        self.welcome = self._socket_fd = None
        self._server.forget()
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def say_bye(self) -> None:
        """Says BYE and forgets the session; the client may attach again later. What it recorded for a trace is handed in first."""
        if self.welcome is not None and self._socket is not None:
            traced = self._live.hand_in()
            with contextlib.suppress(zmq.ZMQError):
                if traced is not None:
                    self._socket.send(client_codec.encode(traced), zmq.NOBLOCK)
                self._socket.send(client_codec.encode(Bye(self.session, self.generation)), zmq.NOBLOCK)
                self._socket.close(linger=200)
                self._socket = None
        self.detach()

    def close(self) -> None:
        """Says BYE if there is a session and closes for good. In a forked child it only forgets. Safe to call twice."""
        if os.getpid() != self._pid:
            return
        self.say_bye()
        self._context.destroy(linger=0)  # also a socket that an interrupted call made and forgot: its end would wait for that

    def _open_socket(self) -> None:
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise BudgetExceeded(
                f"no socket can be made: {error.strerror}; raise this process's limit on open files (ulimit -n)"
            ) from error
        socket.setsockopt(zmq.IDENTITY, secrets.token_bytes(16))
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.connect(self.endpoints.control)
        self._socket, self._socket_fd = socket, socket.fileno()

    def _greet(self, hello: Hello, deadline: Deadline) -> tuple[Welcome | Refused, TraceOn | None]:
        """The answer to HELLO, and what came ahead of it where a trace is on."""
        socket, trace_on = self._connected(), None
        packed, said_at, begun_s = client_codec.encode(hello), -_HELLO_AGAIN_S, time.monotonic()
        while True:
            now = time.monotonic()
            if now - said_at >= _HELLO_AGAIN_S:
                with contextlib.suppress(zmq.Again):
                    socket.send(packed, zmq.NOBLOCK)
                said_at = now
            if socket.poll(int(min(deadline.remaining_s, _HELLO_AGAIN_S) * 1000) + 1):
                message = server_codec.decode(socket.recv())
                if isinstance(message, Refused) or (isinstance(message, Welcome) and message.nonce == hello.nonce):
                    self.silence.heard()
                    return message, trace_on
                if isinstance(message, TraceOn):
                    trace_on = message
            self.silence.wait(begun_s, None, lambda: why_nobody_answers(self.endpoints, time.monotonic() - begun_s))
            if deadline.has_passed:
                self.detach()
                raise ServerGone(why_nobody_answers(self.endpoints, time.monotonic() - begun_s))

    def _take_trace(self, message: TraceOn | TraceOff) -> None:
        traced = self._live.take(message)
        self.trace = self._live.trace
        if traced is not None:
            self.send(traced)

    def _forget_trace(self) -> None:
        self._live.forget()
        self.trace = self._live.trace

    def _is_mine(self, message: ServerMessage) -> bool:
        welcome = self.welcome
        return welcome is not None and (message.session, message.generation) == (welcome.session, welcome.generation)

    def _lost(self, what: str) -> ServerGone:
        self.detach()
        return ServerGone(what)

    def _connected(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            raise ServerGone(f"not attached to server {self.endpoints.name!r}")
        return self._socket

    def _welcomed(self) -> Welcome:
        if self.welcome is None:
            raise ServerGone(f"not attached to server {self.endpoints.name!r}")
        return self.welcome


def check_descriptors() -> None:
    """Raises BudgetExceeded unless a context, a session and its memory find descriptors: libzmq ends the process where it lacks one."""
    with contextlib.ExitStack() as taken:
        try:
            for _ in range(_DESCRIPTORS // 2):
                for fd in os.pipe():
                    taken.callback(os.close, fd)
        except OSError as error:
            raise BudgetExceeded(
                f"a client needs {_DESCRIPTORS} file descriptors: {error.strerror}; close some, or raise this process's limit (ulimit -n)"
            ) from error


def check_threads() -> None:
    """Raises BudgetExceeded where libzmq could not start its threads: it would end the process."""
    if not can_start_threads(_THREADS):
        raise BudgetExceeded(
            f"a client needs {_THREADS} threads and can't start them: raise this process's limit (ulimit -u, docker --pids-limit, "
            "pids.max of its control group)"
        )


def error_of(refused: Refused) -> ReplayError:
    """The error a REFUSED carries, as the class of its code."""
    return errors.by_code.get(refused.code, ReplayError)(refused.message, **refused.details)
