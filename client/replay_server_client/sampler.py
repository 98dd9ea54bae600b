"""Batches of one fixed request, for the caller's thread: the ready one is lent, and goes back with the next call."""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING

from replay_server_protocol.errors import InvalidRequest, ReplayTimeout, shown
from replay_server_protocol.states import BufferEvent, BufferState
from replay_server_protocol.trace import CALLING_THREAD

from replay_server_client.batch import Batch
from replay_server_client.deadline import Deadline
from replay_server_client.place import Place
from replay_server_client.prefetch import Prefetch
from replay_server_client.request import check_exponent, is_count

if TYPE_CHECKING:
    from replay_server_client.engine import Engine


class Sampler:
    """Batches of one fixed request; made by ``Learner.sampler`` and used by the thread that uses the learner."""

    def __init__(self, engine: Engine, prefetch: Prefetch) -> None:
        """``prefetch`` is registered with ``engine``."""
        self.request = prefetch.request
        self.counters = prefetch.counters
        self._engine = engine
        self._prefetch = prefetch
        self._is_by_priority = self.request.is_by_priority
        self._lent: tuple[Batch, Place] | None = None
        self._refused_before = 0

    def sample(
        self, *, min_committed: int = 0, timeout: float | None = 5.0, alpha: float | None = None, beta: float | None = None
    ) -> Batch:
        """The next batch, drawn from a window whose ``committed`` is at least ``min_committed``.

        ``alpha`` and ``beta``, the exponents of priorities and importance weights, hold for all draws to come until others are given;
        batches made ready ahead were drawn with those before. They are 0.6 and 0.4 at first.

        The batch before it ends with this call: its batch buffer is filled again once the work queued so far on the caller's current
        stream is done. Costs a few microseconds when the batch is ready; waits up to ``timeout`` seconds otherwise. Getting ready for a
        ring, at the first batch, comes on top: graphs are captured, and with ``compile`` code is compiled for seconds.

        Raises InvalidRequest for what can never be met, ReplayTimeout naming what was missing, ServerClosing, ServerGone.
        """
        connection = self._engine.connection
        trace = connection.trace
        begin_ns = trace.now_ns() if trace is not None else 0
        connection.check_caller()
        if alpha is not None or beta is not None:
            self._prefetch.exponents = self._exponents(alpha, beta)
        if self._engine.has_thread:
            self._prefetch.head_start.call(time.monotonic_ns())
        self._give_back()
        if self._is_by_priority:
            self._look_at_refused()
        place = self._prefetch.ready(min_committed)
        if place is None:
            place = self._wait(min_committed, timeout)
            self._prefetch.head_start.was_late()
        batch = self._lend(place)
        if trace is not None:
            trace.record(CALLING_THREAD, "boundary", begin_ns, trace.now_ns(), number=batch.number, committed=batch.window[1])
        return batch

    def expect(self, min_committed: int) -> None:
        """Says ahead which seq the batches still to come must reach, so that the prefetched one is fresh when ``sample`` wants it.

        For a learner in step with its collectors: told at the start of an update, the next batch waits at the server for the rows of that
        update and is gathered behind it. Sends at most one message; never waits. A batch that is ready and too old is dropped.
        """
        self._engine.connection.check_caller()
        if not is_count(min_committed, 0):
            raise InvalidRequest(f"min_committed={shown(min_committed)}: a seq, at least 0")
        self._engine.act(lambda: self._prefetch.expect(min_committed))

    @property
    def beta(self) -> float:
        """The exponent of importance weights now."""
        return self._prefetch.exponents[1]

    @property
    def counted_rows(self) -> int:
        """Rows of each batch to come, as samples per insert counts them: fewer than it has where the caller leaves some out."""
        return self._prefetch.counted_rows

    @counted_rows.setter
    def counted_rows(self, rows: int) -> None:
        self._prefetch.counted_rows = rows

    def has_lent(self, batch: Batch) -> bool:
        """Whether ``batch`` is this sampler's last one, not given back yet."""
        return self._lent is not None and self._lent[0] is batch

    def written_counts(self) -> tuple[int, int, int]:
        """Writes of rows that had left the window, priorities that were none, draws with nothing but zero priorities: as far as seen."""
        counts = [write_back.seen_counts() for place in self._prefetch.places for write_back in place.gather.write_backs]
        stale, refused, all_zero = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0)
        return stale, refused, all_zero

    def _exponents(self, alpha: float | None, beta: float | None) -> tuple[float, float]:
        """Those of the draws to come: what is given, else as before. Raises InvalidRequest by name, and nothing has changed."""
        if not self._is_by_priority:
            raise InvalidRequest("alpha and beta are exponents of priorities: sample with by='priority'")
        before_alpha, before_beta = self._prefetch.exponents
        return (
            before_alpha if alpha is None else check_exponent("alpha", alpha),
            before_beta if beta is None else check_exponent("beta", beta),
        )

    def _look_at_refused(self) -> None:
        """Tells what the device has counted by now; a strict request raises."""
        refused = self.written_counts()[1]
        new, self._refused_before = refused - self._refused_before, refused
        if new <= 0:
            return
        told = f"update_priorities was given {new:,} values that are not finite and 0 or above; the rows kept the priorities they had"
        if self.request.strict:
            raise InvalidRequest(told, refused=new)
        warnings.warn(told, RuntimeWarning, stacklevel=4)

    def _give_back(self) -> None:
        """Done again from its beginning where Ctrl-C ended it; a batch whose lending was cut short was nobody's, and is still ready."""
        if self._lent is not None:
            batch, place = self._lent
            batch.expire()
            if place.state is BufferState.LENT:
                place.gather.give_back()
                place.happen(BufferEvent.RETURN)
            self._lent = None

    def _lend(self, place: Place) -> Batch:
        grant = place.granted()
        place.gather.lend()
        batch = Batch(place.memory, place.number, (grant.tail, grant.committed))
        self._lent = batch, place
        self._prefetch.pass_turn(place)
        if self._engine.has_thread:
            start = self._prefetch.head_start
            self._engine.wake(start.lend(time.monotonic_ns()), start.next_ns)
        return batch

    def _wait(self, min_committed: int, timeout: float | None) -> Place:
        if not is_count(min_committed, 0):
            raise InvalidRequest(f"min_committed={shown(min_committed)}: a seq, at least 0")
        deadline, prefetch = Deadline(timeout), self._prefetch

        def is_ready() -> bool:
            begin_s, ring = time.monotonic(), prefetch.ring
            answer = prefetch.is_ready()
            if prefetch.ring is not ring:  # graphs were captured, or code was compiled for many seconds: that was no wait for rows
                deadline.put_off(time.monotonic() - begin_s)
            return answer

        with prefetch.waited_for(min_committed):
            try:
                if not self._engine.drive(is_ready, deadline):
                    reason = prefetch.explain(deadline)
                    waited = f"{self.request.describe()} waited {deadline.elapsed_s:.2f} s"
                    raise ReplayTimeout(f"{waited}: {reason}", rows=self.request.rows)
            finally:
                prefetch.counters.waited_s += deadline.elapsed_s
        place = prefetch.next_place
        assert place is not None  # its batch is ready
        return place
