"""Servers that pass rows on are lost at seeded points, and calls are ended by signals meanwhile: the rows are those of a calm run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from replay_server_client import Collector, ReplayTimeout, ServerGone, ingress, publishes, slots
from support.fake_server import FakeServer
from support.interrupts import ended_at
from support.rarely import rarely
from support.resumed import LANES, SCHEMA, Ring, rows


class Played:
    """The same calls against a server that stays, or one that is lost again and again."""

    def __init__(self, run_dir: Path, seed: int, restarts: bool) -> None:
        rng, calls = random.Random(seed), random.Random(seed + 1)
        with FakeServer(run_dir, slot_rows=rng.choice((4, 6)), depth=4, resumes=True, moments=("return",)) as server:
            with Collector.connect(server.name, schema=SCHEMA, run_dir=run_dir, lanes=LANES, linger=60.0, timeout=5.0) as collector:
                self._play(server, collector, calls, rng if restarts else None)
                server.hold_no_more()
                collector.flush()
                found = collector.statistics()
            self.counts = (found.rows_written, found.rows_committed, found.rows_masked, found.rows_lost)
            self.ring = Ring.of(server)
            self.told_masked = sum(taken.message.masked for taken in self.ring.taken)
            self.resumed = found.publishes_resumed

    def _play(self, server: FakeServer, collector: Collector, calls: random.Random, rng: random.Random | None) -> None:
        at = 0
        for _ in range(80):
            n, what = LANES * calls.randint(1, 2), calls.random()
            columns = rows(at, n)
            if what < 0.1:
                collector.cut([calls.randrange(LANES)])
            elif what < 0.3:
                collector.write(columns, mask=np.arange(n) % 3 != 0)
            else:
                collector.write(columns)
            at += n
            if rng is not None:
                self._harm(server, collector, rng)

    def _harm(self, server: FakeServer, collector: Collector, rng: random.Random) -> None:
        """Without a credit the next write must still find room for all its rows."""
        if rng.random() < 0.3:
            server.depth = rng.randint(1, 4)
            server.restart()
            server.hold_no_more()
        elif server.holds_credits:
            server.hold_no_more()
        else:
            found = collector.statistics()
            server.holds_credits = found.generation == server.generation and found.free_slots > 0


@pytest.mark.parametrize("seed", range(4))
def test_rows_chains_and_sums_are_those_of_a_collector_whose_server_was_never_lost(run_dir: Path, seed: int) -> None:
    calm, harmed = Played(run_dir, seed, restarts=False), Played(run_dir, seed, restarts=True)
    assert harmed.resumed > 0
    assert harmed.counts == calm.counts
    assert harmed.told_masked == calm.told_masked
    assert harmed.ring.rewards == calm.ring.rewards
    assert harmed.ring.lanes == calm.ring.lanes
    assert [each.last for each in harmed.ring.episodes] == [each.last for each in calm.ring.episodes]
    assert harmed.ring.returns.count == calm.ring.returns.count
    assert harmed.ring.returns.mean == pytest.approx(calm.ring.returns.mean)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it came inside a finalizer, where Python swallows it
def test_a_signal_that_ends_a_call_anywhere_loses_no_row_that_was_taken_and_none_is_there_twice(run_dir: Path) -> None:
    """A descriptor that was made and not kept may be left, one a signal: it is not looked for here."""
    rng, at, interrupts = random.Random(2), 0, 0

    def raise_it(_: int, frame: FrameType | None) -> None:
        """In a write alone, once it has begun."""
        while frame is not None:
            if frame.f_code is Collector.write.__code__ and frame.f_lasti >= 20:
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        with (
            FakeServer(run_dir, slot_rows=4, depth=3, resumes=True) as server,
            Collector.connect(server.name, schema=SCHEMA, run_dir=run_dir, lanes=LANES, timeout=5.0) as collector,
        ):
            for _ in range(60):
                server.holds_credits = True
                with contextlib.suppress(ReplayTimeout, ServerGone):
                    collector.write(rows(at, 12), timeout=0.02)
                server.restart()
                server.hold_no_more()
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(5e-5, 4e-3))
                    collector.write(rows(at + 12, 8))
                except KeyboardInterrupt:
                    interrupts += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                at += 20
            collector.flush()
            statistics, ring = collector.statistics(), Ring.of(server)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 10
    assert ring.rewards == sorted(set(ring.rewards))
    assert len(ring.rewards) == statistics.rows_written == statistics.rows_committed
    assert statistics.rows_lost == 0


@pytest.mark.parametrize("stride", [17, *rarely(1)])
def test_a_write_that_is_ended_at_any_place_loses_no_row_that_was_taken_and_none_is_there_twice(run_dir: Path, stride: int) -> None:
    """It finds the server lost. What is told of rows that a mask left out is told once, too."""
    with (
        FakeServer(run_dir, slot_rows=4, depth=3, resumes=True) as server,
        Collector.connect(server.name, schema=SCHEMA, run_dir=run_dir, lanes=LANES, timeout=5.0) as collector,
    ):
        for place in itertools.count(0, stride):
            server.holds_credits = True
            collector.write(rows(20 * place, 10))  # two slots, and a part of the third
            server.restart()
            server.hold_no_more()
            write = functools.partial(collector.write, rows(20 * place + 10, 8), mask=np.arange(8) % 4 != 0)
            is_ended = ended_at(place, write, slots, publishes)
            collector.flush()
            lent = collector._ingress.slots
            assert lent is not None
            assert lent.free_slots + (lent.writer is not None) == server.depth, "an open slot may be left, without rows"
            if not is_ended:
                break
        statistics, ring = collector.statistics(), Ring.of(server)
    assert place > 100
    assert ring.rewards == sorted(set(ring.rewards))
    assert {20 * each + row for each in range(0, place + 1, stride) for row in range(10)} < set(ring.rewards)
    assert len(ring.rewards) == statistics.rows_written == statistics.rows_committed
    assert sum(taken.message.masked for taken in ring.taken) == statistics.rows_masked
    assert statistics.rows_lost == 0


def ended_before_line(n: int, call: Callable[[], None]) -> bool:
    """``call``, as if Ctrl-C ended it before the ``n``-th line that it runs in ingress.py; False if it has fewer."""
    left = n

    def each_line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != ingress.__file__:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return each_line

    before = sys.gettrace()
    sys.settrace(each_line)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("resumes", [True, False])
def test_a_loss_whose_notice_is_ended_anywhere_counts_each_row_once(run_dir: Path, resumes: bool) -> None:
    with (
        FakeServer(run_dir, slot_rows=4, depth=3, resumes=resumes) as server,
        Collector.connect(server.name, schema=SCHEMA, run_dir=run_dir, lanes=LANES, timeout=5.0) as collector,
    ):
        for line in itertools.count():
            server.holds_credits = True
            collector.write(rows(8 * line, 8))
            server.restart()
            is_ended = ended_before_line(line, collector._ingress.lose)
            collector._ingress.lose()
            found = collector.statistics()
            assert (found.rows_in_flight, found.rows_lost) == ((8, 0) if resumes else (0, 8 * line + 8))
            server.hold_no_more()
            with contextlib.nullcontext() if resumes else pytest.raises(ServerGone, match="with it 8 rows"):
                collector.flush()
            if not is_ended:
                break
        assert line > 8
