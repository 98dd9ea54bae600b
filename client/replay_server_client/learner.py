"""The learner: attaches to a server, maps its ring once, and samples batches from it with no copy between processes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from replay_server_protocol.endpoints import Endpoints, check_name
from replay_server_protocol.errors import InvalidRequest, ReplayTimeout, SchemaMismatch, ServerClosing
from replay_server_protocol.messages import PROTOCOL_VERSION, Hello
from replay_server_protocol.process import ProcessIdentity, pid_namespace
from replay_server_protocol.schema import Schema
from replay_server_protocol.trace import Trace
from torch import Tensor

from replay_server_client.batch import Batch
from replay_server_client.connection import Connection
from replay_server_client.deadline import Deadline
from replay_server_client.engine import Engine
from replay_server_client.mapping import check_device, device_uuid
from replay_server_client.probe import Probe
from replay_server_client.request import Request, Seeds, is_count
from replay_server_client.sampler import Sampler
from replay_server_client.status import query


@dataclass(frozen=True, slots=True)
class LearnerHello:
    """Makes the HELLO of each attach. Apart from the learner, which its connection must not keep alive."""

    name: str
    device_uuid: str | None
    schema: Schema | None
    run_id: str | None

    def __call__(self, nonce: int) -> Hello:
        me = ProcessIdentity.current()
        return Hello(
            version=PROTOCOL_VERSION,
            nonce=nonce,
            role="learner",
            name=self.name,
            pid=me.pid,
            start_ticks=me.start_ticks,
            pid_namespace=pid_namespace(),
            run_id=self.run_id,
            schema=self.schema.to_wire() if self.schema is not None else None,
            lanes=0,
            counted=False,
            rows_lost=0,
            device_uuid=self.device_uuid,
        )


@dataclass(frozen=True, slots=True)
class LearnerStatistics:
    """What a learner has done since it was made. ``late`` batches are among the ``dropped`` ones; ``generations`` counts attaches."""

    batches: int
    rows: int
    dropped: int
    late: int
    waited_s: float
    generations: int


class Learner:
    """A session that samples. For one thread at a time; a background thread of its own keeps the next batches ready.

    Every call that may wait attaches again if the server restarted; batches handed out stay valid then. In a forked child every call
    raises ForkedClient.
    """

    def __init__(self, engine: Engine, seeds: Seeds, prefetch: int) -> None:
        self._engine = engine
        self._seeds = seeds
        self._prefetch = prefetch
        self._samplers: list[Sampler] = []
        self._by_request: dict[tuple[int, str, int | None], Sampler] = {}
        self._probe = engine.register(lambda ordinal: Probe(engine.connection, ordinal))
        self._finalizer = weakref.finalize(self, engine.abandon)

    @classmethod
    def connect(
        cls,
        server: str | None = None,
        *,
        device: str = "auto",
        seed: int = 0,
        name: str | None = None,
        prefetch: int = 1,
        run_dir: str | os.PathLike[str] | None = None,
        timeout: float | None = 10.0,
        schema: Schema | None = None,
        run_id: str | None = None,
        trace: Trace | None = None,
    ) -> Self:
        """Attaches; returns as soon as the server answers, before there is a ring.

        ``device`` is where batches lie: auto (the ring's GPU, a GPU for a host ring, else the CPU), cpu, cuda, cuda:N or mps. Learners of
        one ``name`` and ``seed`` draw the same rows; the name defaults to rankN under torchrun, else "learner". ``prefetch`` batches of
        each request are made ready ahead. With ``schema`` the ring's must fit; with ``run_id`` the server's must be it. ``trace`` records
        boundaries (the calls of ``sample``), requests and gathers; ``with trace.span("update"):`` adds the learner's own windows.

        On mps there is no background thread: ``progress()`` and ``sample()`` do all the work, from one thread alone, and ``sample()`` waits
        for its batch where ``progress()`` was not called. That path has not been run on Apple hardware.

        Raises ServerGone when none answers within ``timeout`` seconds, AttachRefused or SchemaMismatch when it refuses, InvalidRequest.
        """
        if not isinstance(seed, int):
            raise InvalidRequest(f"seed={seed!r}: an integer")
        if not is_count(prefetch, 0) or prefetch > 16:
            raise InvalidRequest(f"prefetch={prefetch!r}: batches made ready ahead, 0 to 16")
        if schema is not None and not isinstance(schema, Schema):
            raise SchemaMismatch(f"schema={schema!r}: make one with Schema.of(...)")
        if run_id is not None:
            check_name(run_id, "run_id")
        learner_name = check_name(name or _default_name(), "learner name")
        hello = LearnerHello(learner_name, device_uuid(check_device(device)), schema, run_id)
        connection = Connection(Endpoints.resolve(server, run_dir), hello)
        engine = Engine(connection, device, schema, trace)
        try:
            engine.attach(Deadline(timeout))
            engine.start()
        except BaseException:
            engine.close()
            raise
        return cls(engine, Seeds(seed, learner_name), prefetch)

    @property
    def schema(self) -> Schema | None:
        """The ring's schema; None while there is no ring."""
        ring = self._engine.conversation.ring
        return ring.schema if ring is not None else None

    @property
    def capacity(self) -> int | None:
        """Rows the ring keeps; None while there is no ring."""
        ring = self._engine.conversation.ring
        return ring.at.capacity if ring is not None else None

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until there is a ring and learning may start. Raises ReplayTimeout naming what is missing."""
        self._engine.connection.check_process()
        deadline, probe = Deadline(timeout), self._probe
        probe.ask()
        try:
            if not self._engine.drive(lambda: self._engine.conversation.proved_ring() is not None and probe.has_passed(), deadline):
                reason = self._engine.explain(probe.ordinal, probe.number, deadline)
                raise ReplayTimeout(f"wait_ready waited {deadline.elapsed_s:.2f} s: {reason}")
        finally:
            self._engine.act(probe.stop)

    def sample(
        self, n: int, *, min_committed: int = 0, max_age_rows: int | None = None, by: str = "uniform", timeout: float | None = 5.0
    ) -> Batch:
        """The next batch of ``n`` rows; see ``Sampler.sample``. Each distinct (n, by, max_age_rows) has batch buffers of its own.

        ``max_age_rows`` draws from the newest so many rows only. A prefetched batch older than ``min_committed`` is dropped: where that
        moves at every call, prefetch=0 wastes nothing.
        """
        key = (n, by, max_age_rows)
        sampler = self._by_request.get(key)
        if sampler is None:
            sampler = self._by_request[key] = self._make_sampler(Request.of(n, by, max_age_rows))
        return sampler.sample(min_committed=min_committed, timeout=timeout)

    def sampler(self, n: int, *, by: str = "uniform", max_age_rows: int | None = None) -> Sampler:
        """A request with batch buffers and request numbers of its own, which it keeps until the learner is closed or dropped."""
        return self._make_sampler(Request.of(n, by, max_age_rows))

    def batches(self, n: int, *, max_age_rows: int | None = None, by: str = "uniform", timeout: float | None = 5.0) -> Iterator[Batch]:
        """Batches without end, until the server stops in good order. Raises ServerGone when it ends otherwise and none takes its place."""
        while True:
            try:
                batch = self.sample(n, max_age_rows=max_age_rows, by=by, timeout=timeout)
            except ServerClosing:
                return
            yield batch

    def post(self, name: str, arrays: Mapping[str, object], timeout: float | None = 5.0) -> int:
        """Makes ``arrays`` (numpy arrays, or tensors on any device) the newest version of mailbox ``name`` and returns the version.

        Raises InvalidRequest for what can't be sent, the server's error if it refuses, ReplayTimeout.
        """
        self._engine.connection.check_process()
        check_name(name, "mailbox name")
        deadline = Deadline(timeout)
        version = self._engine.post(name, _hosted(arrays), deadline)
        if version is None:
            raise ReplayTimeout(f"post({name!r}) waited {deadline.elapsed_s:.2f} s: the server has not taken the arrays")
        return version

    def progress(self) -> None:
        """Keeps the next batches coming, from this thread; never waits. The first call ends the background thread for good.

        For loops that keep Python busy, where a background thread would wait for the interpreter: call it between steps.
        """
        self._engine.connection.check_process()
        self._engine.progress()

    def statistics(self) -> LearnerStatistics:
        self._engine.connection.check_process()
        counters = [(sampler.counters, sampler.request.rows) for sampler in self._samplers]
        return LearnerStatistics(
            batches=sum(c.batches for c, _ in counters),
            rows=sum(c.batches * rows for c, rows in counters),
            dropped=sum(c.dropped for c, _ in counters),
            late=sum(c.late for c, _ in counters),
            waited_s=sum(c.waited_s for c, _ in counters),
            generations=self._engine.attached,
        )

    def moments(self, field: str, timeout: float | None = 1.0) -> dict[str, object]:
        """Count, mean, std, min and max of a field over all committed rows, as the server keeps them (``serve --moments``)."""
        self._engine.connection.check_process()
        kept = query(self._engine.connection.endpoints, timeout).get("moments")
        found = kept.get(field) if isinstance(kept, dict) else None
        if not isinstance(found, dict):
            names = ", ".join(map(str, kept)) if isinstance(kept, dict) and kept else "none"
            raise InvalidRequest(f"the server keeps no moments of {field!r}; it keeps: {names}; serve with --moments {field}")
        return found

    def close(self) -> None:
        """Unmaps the ring and says BYE; batches handed out stay. In a forked child it does nothing. Safe to call twice."""
        self._finalizer.detach()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _make_sampler(self, request: Request) -> Sampler:
        engine, seeds, prefetch = self._engine, self._seeds, self._prefetch
        engine.connection.check_process()
        sampler = engine.register(lambda ordinal: Sampler(engine, ordinal, request, seeds, prefetch))
        self._samplers.append(sampler)
        return sampler


def _default_name() -> str:
    rank = os.environ.get("RANK", "")
    return f"rank{rank}" if rank.isdecimal() else "learner"


def _hosted(arrays: Mapping[str, object]) -> Mapping[str, object]:
    """The arrays with every tensor in host memory; what isn't a mapping is refused later, by name."""
    if not isinstance(arrays, Mapping):
        return arrays
    return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in arrays.items()}
