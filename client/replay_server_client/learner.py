"""The learner: attaches to a server, maps its ring once, and samples batches from it with no copy between processes."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self, Unpack

import torch
from replay_server_protocol.endpoints import Endpoints, check_name
from replay_server_protocol.errors import InvalidRequest, ReplayTimeout, ServerClosing, shown
from replay_server_protocol.schema import Schema
from replay_server_protocol.trace import Trace
from torch import Tensor

from replay_server_client.batch import Batch
from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.compiled import HowToRun, compiled, plain
from replay_server_client.connection import Connection
from replay_server_client.conversation import LOOKOUT
from replay_server_client.deadline import Deadline
from replay_server_client.engine import Engine
from replay_server_client.learner_hello import LearnerHello, check_flags, check_options, default_name
from replay_server_client.look import Rows, Selection
from replay_server_client.lookout import Lookout
from replay_server_client.mapping import check_device, device_uuid
from replay_server_client.observer import look_at
from replay_server_client.prefetch import Prefetch
from replay_server_client.probe import Probe
from replay_server_client.request import Request, RequestOptions, Seeds
from replay_server_client.sampler import Sampler
from replay_server_client.scalars import scalars
from replay_server_client.status import query


@dataclass(frozen=True, slots=True)
class LearnerStatistics:
    """What a learner has done since it was made. ``late`` batches are among the ``dropped`` ones; ``generations`` counts attaches.

    Of what was written back as far as the host has seen it: ``stale_writes`` came after their row had left the window,
    ``refused_priorities`` were none; ``all_zero_draws`` found no priority above 0 and were uniform.
    """

    batches: int
    rows: int
    dropped: int
    late: int
    waited_s: float
    stale_writes: int
    refused_priorities: int
    all_zero_draws: int
    generations: int


class Learner:
    """A session that samples. For one thread at a time; a background thread of its own keeps the next batches ready.

    Every call that may wait attaches again if the server restarted; batches handed out stay valid then. In a forked child every call
    raises ForkedClient.
    """

    def __init__(self, engine: Engine, seeds: Seeds, prefetch: int, how: HowToRun = plain) -> None:
        self._engine = engine
        self._how = how
        self._seeds = seeds
        self._prefetch = prefetch
        self._samplers: list[Sampler] = []
        self._by_request: dict[Request, Sampler] = {}
        self._probe = engine.register(lambda ordinal: Probe(engine.connection, ordinal))
        self._lookout = engine.register(lambda ordinal: Lookout(engine, ordinal), LOOKOUT)
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
        compile: bool = False,  # noqa: A002 - what torch calls it
        reattach: bool = True,
        require_zero_copy: bool = False,
    ) -> Self:
        """Attaches; returns as soon as the server answers, before there is a ring.

        ``device`` is where batches lie: auto (the ring's GPU, a GPU for a host ring, else the CPU), cpu, cuda, cuda:N or mps. Learners of
        one ``name`` and ``seed`` draw the same rows; the name defaults to rankN under torchrun, else "learner". ``prefetch`` batches of
        each request are made ready ahead. With ``schema`` the ring's must fit; with ``run_id`` the server's must be it. ``trace`` records
        boundaries (the calls of ``sample``), requests and gathers; ``with learner.span("update"):`` adds the learner's own windows.

        With ``compile`` draws and walks are compiled by torch.compile at the first batch of each request: seconds, once in a process for
        each shape, for fewer kernels a batch. The rows are the same; weights, and the rewards of n-step rows, may differ in the last
        digits. Where compiling fails a RuntimeWarning says why, and they run as without.

        With ``require_zero_copy`` a ring whose batches would pass through host memory on their way to the device is refused, by the first
        call that needs the ring: AttachRefused. Status tells the ``transport`` of every learner.

        With ``reattach=False`` a lost server is not waited for: ServerGone at once, and from then on.

        On mps there is no background thread: ``progress()`` and ``sample()`` do all the work, from one thread alone, and ``sample()`` waits
        for its batch where ``progress()`` was not called. That path has not been run on Apple hardware.

        Raises ServerGone when none answers within ``timeout`` seconds, AttachRefused or SchemaMismatch when it refuses, InvalidRequest.
        """
        check_options(seed, prefetch, compile, schema, run_id, trace)
        check_flags(reattach=reattach, require_zero_copy=require_zero_copy)
        learner_name = check_name(default_name() if name is None else name, "learner name")
        hello = LearnerHello(learner_name, device_uuid(check_device(device)), schema, run_id)
        connection = Connection(Endpoints.resolve(server, run_dir), hello, trace, f"learner {learner_name}")
        engine = Engine(connection, device, schema, reattaches=reattach, require_zero_copy=require_zero_copy)
        engine.open(timeout)
        return cls(engine, Seeds(seed, learner_name), prefetch, compiled if compile else plain)

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
        self,
        n: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        min_committed: int = 0,
        timeout: float | None = 5.0,
        alpha: float | None = None,
        beta: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Batch:
        """The next batch of ``n`` transitions of up to ``n_step`` steps; see ``Sampler.sample`` and ``RequestOptions``.

        Each distinct request has batch buffers of its own. A prefetched batch older than ``min_committed`` is dropped: where that moves at
        every call, prefetch=0 wastes nothing.

        With ``n_step`` above 1 (needs ``serve --columns link``) reward is the sum of the rewards of the rows used, discounted by ``gamma``;
        next fields, terminated and truncated are those of the last one. Episodes, cuts and the newest row end a transition early.
        """
        request = Request.transitions(n, n_step=n_step, gamma=gamma, **options)
        return self._sampler_of(request).sample(min_committed=min_committed, timeout=timeout, alpha=alpha, beta=beta)

    def sequences(
        self,
        n: int,
        *,
        length: int = 64,
        burn_in: int = 0,
        stride: int = 1,
        crosses_episodes: bool = False,
        min_committed: int = 0,
        timeout: float | None = 5.0,
        alpha: float | None = None,
        beta: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Batch:
        """The next batch of ``n`` windows of ``length`` rows of a lane: fields ``dtype[n, length, *shape]``, ``mask``, ``is_first``.

        Any row of the window may be a first row; every ``stride``-th row of the lane follows. A window ends early, and ``mask`` says so,
        at a cut, at the newest row and at the end of an episode; with ``crosses_episodes`` it goes on into the next one, where ``is_first``
        is True. ``loss_mask`` leaves out the first ``burn_in`` rows too. Needs ``serve --columns link``; counts as n * length sampled rows.
        """
        request = Request.sequences(n, length=length, burn_in=burn_in, stride=stride, crosses_episodes=crosses_episodes, **options)
        return self._sampler_of(request).sample(min_committed=min_committed, timeout=timeout, alpha=alpha, beta=beta)

    @property
    def generation(self) -> int | None:
        """That of the server's life this learner is attached to; None once that was seen to have ended."""
        connection = self._engine.connection
        return connection.generation if connection.is_attached and not connection.has_server_ended() else None

    def sampler_for(self, request: Request) -> Sampler:
        """As ``sampler``, of a request that was checked before."""
        return self._make_sampler(request)

    def sampler(self, n: int, *, n_step: int = 1, gamma: float = 0.99, **options: Unpack[RequestOptions]) -> Sampler:
        """A request with batch buffers and request numbers of its own, which it keeps until the learner is closed or dropped."""
        return self._make_sampler(Request.transitions(n, n_step=n_step, gamma=gamma, **options))

    def sequence_sampler(
        self,
        n: int,
        *,
        length: int = 64,
        burn_in: int = 0,
        stride: int = 1,
        crosses_episodes: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Sampler:
        """As ``sampler``, of ``sequences``."""
        request = Request.sequences(n, length=length, burn_in=burn_in, stride=stride, crosses_episodes=crosses_episodes, **options)
        return self._make_sampler(request)

    def batches(
        self, n: int, *, n_step: int = 1, gamma: float = 0.99, timeout: float | None = 5.0, **options: Unpack[RequestOptions]
    ) -> Iterator[Batch]:
        """Batches without end, until the server stops in good order. Raises ServerGone when it ends otherwise and none takes its place."""
        sampler = self._sampler_of(Request.transitions(n, n_step=n_step, gamma=gamma, **options))
        while True:
            try:
                batch = sampler.sample(timeout=timeout)
            except ServerClosing:
                return
            yield batch

    def update_priorities(self, batch: Batch, priorities: Tensor | Sequence[float]) -> None:
        """Gives the n rows drawn for ``batch`` (``by="priority"``) new priorities, finite numbers of at least 0, on any device;
        those above 1e18 become that.

        Queued on the current stream; never waits for the device. They are written under the next lease of the batch's buffer, which is
        asked for once ``sample()`` has taken the batch back: the draws after that see them. A row that has left the window by then keeps
        out (``statistics().stale_writes``). What is not a priority is left out and counted, and told by a later ``sample()``.

        Raises InvalidRequest for a batch that is over, was not drawn by priority, or another number of values.
        """
        memory, given = self._lent_memory(batch), _numbers(priorities)
        if given.numel() != memory.request.n:
            raise InvalidRequest(f"priorities {list(given.shape)}: one for each of the batch's {memory.request.n:,} draws is right")
        memory.write_back.write_priorities(given)

    def update(self, batch: Batch, values: Mapping[str, Tensor]) -> None:
        """Writes new values of mutable fields (``Field(..., mutable=True)``) of the batch's rows back, under the rules of
        ``update_priorities``.

        ``values`` are shaped and typed as ``batch[field]``. Of sequences the rows under ``mask`` are written. Mutable fields that are not
        named keep what the batch saw; where two learners write one row at once, each element is one of the two's.
        """
        memory = self._lent_memory(batch)
        memory.write_back.write_values(memory.fields, values, memory.results.get("mask"))

    def read(
        self,
        *,
        newest: int | None = None,
        seqs: Selection | None = None,
        episode_of: int | None = None,
        fields: Sequence[str] | None = None,
        timeout: float | None = 30.0,
    ) -> Rows:
        """Copies of rows as numpy arrays, outside every count and limit: see ``Observer.read``. For looking, not for training."""
        return look_at(self._lookout, newest, seqs, episode_of, fields, Deadline(timeout))

    def post(self, name: str, arrays: Mapping[str, object], timeout: float | None = 5.0) -> int:
        """Makes ``arrays`` (numpy arrays, or tensors on any device) the newest version of mailbox ``name`` and returns the version.

        Raises InvalidRequest for what can't be sent, the server's error if it refuses, ReplayTimeout.
        """
        self._engine.connection.check_process()
        check_name(name, "mailbox name")
        deadline = Deadline(timeout)
        version = self._engine.post(name, _hosted(arrays), deadline)
        if version is None:
            raise ReplayTimeout(f"post({name!r}) waited {deadline.elapsed_s:.2f} s: {self._engine.connection.why_silent()}")
        return version

    def progress(self) -> None:
        """Keeps the next batches coming, from this thread; never waits. The first call ends the background thread for good.

        For loops that keep Python busy, where a background thread would wait for the interpreter: call it between steps.
        """
        self._engine.connection.check_process()
        self._engine.progress()

    def span(self, name: str, **args: int | float | str) -> AbstractContextManager[None]:
        """Records the block as a span while a trace is on (``replay-server trace start``, or this learner's own), else does nothing."""
        trace = self._engine.connection.trace
        return contextlib.nullcontext() if trace is None else trace.span(name, **args)

    def statistics(self) -> LearnerStatistics:
        self._engine.connection.check_process()
        counters = [(sampler.counters, sampler.request.rows) for sampler in self._samplers]
        written = [sampler.written_counts() for sampler in self._samplers]
        return LearnerStatistics(
            batches=sum(c.batches for c, _ in counters),
            rows=sum(c.batches * rows for c, rows in counters),
            dropped=sum(c.dropped for c, _ in counters),
            late=sum(c.late for c, _ in counters),
            waited_s=sum(c.waited_s for c, _ in counters),
            stale_writes=sum(stale for stale, _, _ in written),
            refused_priorities=sum(refused for _, refused, _ in written),
            all_zero_draws=sum(all_zero for _, _, all_zero in written),
            generations=self._engine.attached,
        )

    def moments(self, field: str, timeout: float | None = 1.0) -> dict[str, object]:
        """Count, mean, std, min and max of a field over all committed rows, as the server keeps them (``serve --moments``)."""
        self._engine.connection.check_process()
        kept = query(self._engine.connection.endpoints, timeout).get("moments")
        found = kept.get(field) if isinstance(kept, dict) and isinstance(field, str) else None
        if not isinstance(found, dict):
            names = ", ".join(map(str, kept)) if isinstance(kept, dict) and kept else "none"
            raise InvalidRequest(f"the server keeps no moments of {shown(field)}; it keeps: {names}; name fields with serve --moments")
        return found

    def scalars(self, name: str = "replay", timeout: float | None = 1.0) -> dict[str, float]:
        """The server's figures as one flat dict for wandb or TensorBoard, each key ``name/part/figure``; see ``scalars``."""
        self._engine.connection.check_process()
        return scalars(query(self._engine.connection.endpoints, timeout), name)

    def close(self) -> None:
        """Unmaps the ring and says BYE; batches handed out stay. In a forked child it does nothing. Safe to call twice."""
        self._finalizer.detach()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _lent_memory(self, batch: Batch) -> BatchBuffer:
        self._engine.connection.check_process()
        if not isinstance(batch, Batch):
            raise InvalidRequest(f"batch={shown(batch)}: what sample() or sequences() returned")
        memory = batch.memory()
        if not any(sampler.has_lent(batch) for sampler in self._samplers):
            raise InvalidRequest(f"{batch!r} is another learner's: write back with the learner that sampled it")
        return memory

    def _sampler_of(self, request: Request) -> Sampler:
        sampler = self._by_request.get(request)
        if sampler is None:
            sampler = self._by_request[request] = self._make_sampler(request)
        return sampler

    def _make_sampler(self, request: Request) -> Sampler:
        engine, seeds, ahead, how = self._engine, self._seeds, self._prefetch, self._how
        engine.connection.check_process()
        sampler = Sampler(engine, engine.register(lambda ordinal: Prefetch(engine, ordinal, request, seeds, ahead, how)))
        self._samplers.append(sampler)
        return sampler


def _hosted(arrays: Mapping[str, object]) -> Mapping[str, object]:
    """The arrays with every tensor in host memory; what isn't a mapping is refused later, by name."""
    if not isinstance(arrays, Mapping):
        return arrays
    return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in arrays.items()}


def _numbers(priorities: object) -> Tensor:
    """Raises InvalidRequest for what torch makes no tensor of numbers from."""
    try:
        given = torch.as_tensor(priorities)
    except Exception as error:  # torch has no one class for that
        raise InvalidRequest(f"priorities={shown(priorities)}: a tensor or a sequence of numbers ({str(error)[:80]})") from error
    if given.is_complex():
        raise InvalidRequest(f"priorities of {given.dtype}: real numbers are right")
    return given
