"""A barrage on a living server: hostile messages from strangers and from sessions of every role, on both sockets, while others work.

``Barrage.fire`` sends rounds; each opens its connections anew. ``witness_collector`` and ``witness_learner`` are the others: children that
write and sample as usual and say at the end what they saw.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import zmq
from replay_server_client.status import query
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.messages import MAX_MESSAGE_BYTES
from support.hostile import Frames, Hostile
from support.markers import MARKERS
from support.raw_client import RawClient, RawCollector, RawLearner

ROUND = 20_000
OPTIONS = (
    *("--capacity", "4096", "--slot-rows", "64", "--headroom", "4096", "--columns", "link,priority", "--moments", "reward"),
    *("--mailbox-bytes", "1MiB", "--lease", "0.05", "--max-collectors", "200", "--max-learners", "200", "--log-level", "warning"),
)
"""Of the server: small, with everything on; leases short, because the barrage never releases one."""
_SEND_WITHIN_MS = 20_000
_SHARES = (3, 2, 2, 1)  # strangers, a collector, a learner, an operator
_STATUS_SHARE = 100
_READ_WITHIN_S, _LOOK_AGAIN_S = 60.0, 0.3


@dataclass(frozen=True, slots=True)
class Weight:
    """What a process takes."""

    rss_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Weight:
        process = psutil.Process(pid)
        with process.oneshot():
            return cls(process.memory_info().rss, process.num_fds(), process.num_threads())


class Barrage:
    """``sent`` messages so far, of which ``malformed`` the codec refuses. Raises zmq.Again if the server stops reading."""

    def __init__(self, endpoints: Endpoints, seed: int) -> None:
        self.sent = self.malformed = 0
        self._endpoints = endpoints
        self._rng = random.Random(seed)

    def fire(self, messages: int) -> None:
        """One round."""
        rng = self._rng
        with contextlib.ExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            stranger = stack.enter_context(_dealer(context, self._endpoints.control))
            status = stack.enter_context(_dealer(context, self._endpoints.status))
            self._giants(context)
            sessions: list[RawClient] = [
                stack.enter_context(RawCollector(self._endpoints, MARKERS, lanes=4)),
                stack.enter_context(RawLearner(self._endpoints)),
                stack.enter_context(RawClient(self._endpoints, "admin")),
            ]
            welcomes = [session.welcome for session in sessions]
            streams = [Hostile(rng.getrandbits(32), w.session, w.generation, MARKERS) for w in (welcomes[rng.randrange(3)], *welcomes)]
            senders = [stranger, *(session.socket for session in sessions)]
            for sender in senders:
                sender.setsockopt(zmq.SNDTIMEO, _SEND_WITHIN_MS)
            self._send(senders, [iter(stream) for stream in streams], status, messages)
            self.malformed += sum(stream.malformed for stream in streams)
            self._wait_until_read()

    def _send(self, senders: Sequence[zmq.Socket[bytes]], streams: Sequence[Iterator[Frames]], status: zmq.Socket[bytes], n: int) -> None:
        turns = [turn for turn, share in enumerate(_SHARES) for _ in range(share)]
        for first in range(0, n, len(turns)):
            for turn in turns[: n - first]:
                senders[turn].send_multipart(next(streams[turn]))
                self.sent += 1
            if first % _STATUS_SHARE < len(turns):
                status.send_multipart(self._rng.choice(((b"status",), (b"",), (b"STATUS",), (b"status", b""), (b"x" * 1024,))))

    def _wait_until_read(self) -> None:
        """Before the connections close: libzmq drops what a peer that is gone had sent beyond the mark of unread messages."""
        end, before = time.monotonic() + _READ_WITHIN_S, -1
        while time.monotonic() < end:
            counters: Any = query(self._endpoints, _READ_WITHIN_S)["counters"]
            now = counters["bad_messages"] + counters["stale_messages"]
            if now == before and counters["bad_messages"] >= self.malformed:
                return
            before = now
            time.sleep(_LOOK_AGAIN_S)
        raise AssertionError(f"{self.malformed:,} malformed messages were sent, the server counts {counters}")

    def _giants(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """A frame above the limit ends its connection, so each has one of its own. The others are as large as may be."""
        n = MAX_MESSAGE_BYTES - 64
        for frame in (
            bytes(5 << 20),
            b"\x93\x01\xdd" + n.to_bytes(4, "big") + b"\x90" * n,
            b"\x93\x01" + b"\xdd\x00\x20\x00\x00" * (n // 5),
        ):
            for address in (self._endpoints.control, self._endpoints.status):
                with _dealer(context, address) as giant:
                    giant.send(frame)


@contextlib.contextmanager
def _dealer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> Iterator[zmq.Socket[bytes]]:
    """A connection that never reads."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 5000)
        socket.setsockopt(zmq.SNDTIMEO, _SEND_WITHIN_MS)
        socket.connect(address)
        yield socket


def rounds(messages: int) -> Iterator[int]:
    """``messages`` in rounds."""
    return (min(ROUND, messages - first) for first in range(0, messages, ROUND))


def settle(pid: int, weight: Weight, within_s: float) -> Weight:
    """The server's weight as soon as it has no more descriptors than ``weight``; the last one if it never has."""
    end = time.monotonic() + within_s
    while (now := Weight.of(pid)).descriptors > weight.descriptors and time.monotonic() < end:
        time.sleep(0.05)  # another process's state is no event here
    return now


def witness_collector(name: str, run_dir: str, stop_path: str, pause_s: float) -> dict[str, float]:
    """Writes marker rows until ``stop_path`` exists. Returns what it wrote and what the server says of it."""
    import os
    import time

    from replay_server_client import Collector
    from replay_server_client.status import query
    from replay_server_protocol.endpoints import Endpoints
    from support.markers import MARKERS, marker_steps

    step, slowest_s = 0, 0.0
    with Collector.connect(name, schema=MARKERS, lanes=4, run_dir=run_dir, name="witness", timeout=60) as collector:
        print("writing", flush=True)
        while not os.path.exists(stop_path):
            before_s = time.monotonic()
            collector.write(marker_steps(7, 4, step, 25))
            slowest_s = max(slowest_s, time.monotonic() - before_s)
            step += 25
            time.sleep(pause_s)
        collector.flush(60)
        me = next(c for c in query(Endpoints.resolve(name, run_dir), 20)["collectors"] if c["name"] == "witness")  # type: ignore[attr-defined]
    return {"written": 4 * step, "committed": me["committed_rows"], "rejected": me["rejected_rows"], "slowest_s": slowest_s}


def witness_learner(name: str, run_dir: str, stop_path: str, pause_s: float) -> dict[str, float]:
    """Samples and judges every row until ``stop_path`` exists."""
    import os
    import time

    from replay_server_client import Learner
    from support.markers import is_whole

    rows = broken = 0
    slowest_s = 0.0
    with Learner.connect(name, device="cpu", run_dir=run_dir, name="witness", timeout=60) as learner:
        learner.sample(64, timeout=60)
        print("sampling", flush=True)
        while not os.path.exists(stop_path):
            before_s = time.monotonic()
            batch = learner.sample(64, timeout=60)
            slowest_s = max(slowest_s, time.monotonic() - before_s)
            rows, broken = rows + 64, broken + 64 - int(is_whole(batch.fields).sum())
            time.sleep(pause_s)
    return {"rows": rows, "broken": broken, "slowest_s": slowest_s}
