"""A server that passes rows on may be lost: what it had not credited goes to its successor, once, in order, before anything new."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from replay_server_client import Collector, ReplayTimeout, Schema, SchemaMismatch, ServerClosing, ServerGone
from replay_server_protocol.episodes import EndedEpisodes, unpack_episodes
from replay_server_protocol.messages import Mapped, Publish
from replay_server_protocol.moments import Moments
from replay_server_protocol.origins import Origins, Turn
from support.fake_server import FakeServer, Taken
from support.leaks import nothing_left

SCHEMA = Schema.of(reward="float32", terminated="bool", truncated="bool")
LANES = 2

Attach = Callable[..., Collector]


@pytest.fixture
def server(run_dir: Path) -> Iterator[FakeServer]:
    with nothing_left(), FakeServer(run_dir, slot_rows=4, depth=3, resumes=True, moments=("return",)) as fake:
        yield fake


@pytest.fixture
def attach(server: FakeServer) -> Iterator[Attach]:
    attached: list[Collector] = []

    def connect(**options: object) -> Collector:
        wanted: dict[str, object] = {"lanes": LANES, "linger": 60.0, "timeout": 5.0} | options
        attached.append(Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, **wanted))  # type: ignore[arg-type]
        return attached[-1]

    yield connect
    server.hold_no_more()
    for collector in attached:
        try:
            collector.close()
        except ServerGone:
            continue


def rows(first: int, n: int) -> dict[str, object]:
    """Every tenth row ends an episode."""
    reward = np.arange(first, first + n, dtype=np.float32)
    return {"reward": reward, "terminated": reward % 10 == 9, "truncated": np.zeros(n, np.bool_)}


@dataclass
class Ring:
    """What a ring's server makes of publishes that any number of sessions bring: each once, none before its turn."""

    taken: list[Taken] = field(default_factory=list)
    repeated: int = 0

    @classmethod
    def of(cls, server: FakeServer) -> Ring:
        server.settle()
        ring, origins = cls(), Origins()
        for taken in server.taken:
            message = taken.message
            turn = origins.judge(message.origin, message.origin_number, message.origin_first)
            assert turn is not Turn.EARLY, message
            ring.repeated += turn is Turn.REPEAT
            if turn is Turn.NEXT:
                origins.take(message.origin, message.origin_number)
                ring.taken.append(taken)
        return ring

    @property
    def rewards(self) -> list[float]:
        found: list[float] = np.concatenate([SCHEMA["reward"].view(taken.rows) for taken in self.taken]).tolist()
        return found

    @property
    def lanes(self) -> list[int]:
        def marked(message: Publish) -> bytes:
            return message.lanes or np.resize(np.arange(LANES, dtype=np.int32), message.rows).tobytes()

        found: list[int] = np.frombuffer(b"".join(marked(taken.message) for taken in self.taken), np.int32).tolist()
        return found

    @property
    def episodes(self) -> list[EndedEpisodes]:
        return [unpack_episodes(taken.message.episodes) for taken in self.taken if taken.message.episodes]

    @property
    def returns(self) -> Moments:
        total = Moments.empty(1)
        for taken in self.taken:
            if taken.message.rows:
                total.merge(Moments.unpack(taken.message.moments[0], 1))
        return total


def test_rows_in_flight_go_to_the_next_server_before_new_ones_and_none_is_lost(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 4))
    collector.flush()
    server.holds_credits = True
    collector.write(rows(4, 10))  # two slots, and a part of the third
    server.restart()
    server.holds_credits = False
    collector.write(rows(14, 10))
    collector.flush()
    statistics = collector.statistics()
    assert (statistics.rows_written, statistics.rows_committed, statistics.rows_lost) == (24, 24, 0)
    assert statistics.publishes_resumed == 3
    ring = Ring.of(server)
    assert ring.rewards == list(range(24))
    assert ring.repeated == 2
    assert [message.rows_lost for message in server.of(Mapped) if isinstance(message, Mapped)] == [0, 0]
    told = [taken.message for taken in server.taken]
    assert len({message.origin for message in told}) == 1
    assert [m.origin_number for m in told] == [1, 2, 3, 2, 3, 4, 5, 6, 7][: len(told)]


def test_a_server_with_a_ring_of_its_own_is_told_no_origin_and_its_loss_costs_rows(server: FakeServer, attach: Attach) -> None:
    server.resumes, server.holds_credits = False, True
    collector = attach()
    collector.write(rows(0, 4))
    assert (server.taken[0].message if server.of(Publish) else None) is not None
    assert server.taken[0].message[-3:] == ("", 0, 0)
    server.restart()
    server.holds_credits = False
    with pytest.raises(ServerGone, match="4 rows"):
        collector.flush()


def test_a_flush_that_meets_the_loss_goes_on_with_the_next_server(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 10))
    server.restart()
    seq = collector.flush()
    assert Ring.of(server).rewards == list(range(10))
    server.restart()
    assert collector.flush() == seq, "nothing was in flight: the ring behind the server is the same"


def test_what_is_kept_waits_for_credits_where_the_next_server_lends_fewer_slots(server: FakeServer, attach: Attach) -> None:
    server.holds_credits = True
    collector = attach()
    collector.write(rows(0, 12))
    server.depth = 1
    server.restart()
    with pytest.raises(ReplayTimeout, match="no credit: all 1 slots are published; 2 more from before a server was lost go first") as late:
        collector.write(rows(12, 4), timeout=0.1)
    assert late.value.rows_written == 0
    assert collector.statistics().rows_in_flight == 12
    assert server.taken[-1].message.origin_number == 1
    server.hold_no_more()
    collector.write(rows(12, 4))
    collector.flush()
    assert Ring.of(server).rewards == list(range(16))


def test_a_server_that_is_lost_while_it_is_told_again_costs_nothing_either(server: FakeServer, attach: Attach) -> None:
    server.holds_credits = True
    collector = attach()
    collector.write(rows(0, 12))
    server.depth = 2
    for credited in (1, 0, 1):
        server.restart()
        with pytest.raises(ReplayTimeout):
            collector.write(rows(100, 4), timeout=0.05)
        server.credit(credited) if credited else None
    server.restart()
    server.hold_no_more()
    collector.write(rows(12, 4))
    collector.flush()
    assert Ring.of(server).rewards == list(range(16))
    assert collector.statistics().rows_lost == 0


@pytest.mark.parametrize("why", ["has a ring of its own", "lends slots of 2 rows, and one of these had 4", "has another moments"])
def test_what_the_next_server_cannot_take_as_it_is_is_told_as_lost_and_why(server: FakeServer, attach: Attach, why: str) -> None:
    server.holds_credits = True
    collector = attach()
    collector.write(rows(0, 12))
    origin = server.taken[0].message.origin if server.of(Publish) else ""
    server.resumes, server.slot_rows = "ring" not in why, 2 if "slots" in why else 4
    server.moments = () if "moments" in why else ("return",)
    server.restart()
    server.holds_credits = False
    collector.write(rows(12, 4))
    with pytest.raises(ServerGone, match=f"12 rows that it had not committed.*kept for its successor, which {why}") as gone:
        collector.flush()
    assert gone.value.details["rows_lost"] == 12
    assert collector.flush() == 4
    new = [taken for taken in server.taken if taken.message.generation == 2]
    assert np.concatenate([SCHEMA["reward"].view(taken.rows) for taken in new]).tolist() == [12, 13, 14, 15]
    assert new[0].message.origin_number == (0 if "ring" in why else 1)
    assert new[0].message.origin != origin
    assert np.frombuffer(new[0].message.lanes, np.int32)[:2].tolist() == [~0, ~1], "the rows before these are missing"
    assert [message.rows_lost for message in server.of(Mapped) if isinstance(message, Mapped)] == [0, 12]


def test_another_schema_is_refused_by_name_and_the_rows_stay_kept(server: FakeServer, attach: Attach) -> None:
    server.holds_credits = True
    collector = attach()
    collector.write(rows(0, 12))
    server.refusal = ("schema_mismatch", "field 'reward' is float64 there")
    server.restart()
    with pytest.raises(SchemaMismatch, match="'reward' is float64"):
        collector.write(rows(12, 4))
    assert collector.statistics().rows_in_flight == 12
    server.refusal, server.holds_credits = None, False
    collector.write(rows(12, 4))
    collector.flush()
    assert Ring.of(server).rewards == list(range(16))


def test_a_call_that_finds_no_server_says_what_it_took_and_the_next_one_goes_on(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    server.holds_credits = True
    collector.write(rows(0, 12))
    server.close_in_good_order()
    with pytest.raises(ServerClosing) as closing:
        collector.write(rows(12, 4))
    server.is_silent = True
    with pytest.raises(ServerGone) as gone:
        collector.write(rows(12, 4), timeout=0.05)
    with pytest.raises(ServerGone, match="no server called"):
        collector.flush(0.05)
    assert closing.value.rows_written == gone.value.rows_written == 0
    assert collector.statistics().rows_in_flight == 12
    server.is_silent = server.holds_credits = False
    server.restart()
    collector.write(rows(12, 4))
    collector.flush()
    assert Ring.of(server).rewards == list(range(16))


def test_a_collector_that_closes_without_a_server_tells_what_was_lost(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay_server_client.collector._CLOSE_WAIT_S", 0.05)
    monkeypatch.setattr("replay_server_client.collector._NEXT_SERVER_WAIT_S", 0.05)
    server.holds_credits = True
    collector = Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, lanes=LANES)
    collector.write(rows(0, 8))
    server.close_in_good_order()
    with pytest.raises(ServerClosing):
        collector.flush()
    server.is_silent = True
    with pytest.raises(ServerGone, match="8 rows") as gone:
        collector.close()
    assert gone.value.details["rows_lost"] == 8
    assert collector.statistics().rows_lost == 8


def test_a_collector_that_closes_after_a_loss_waits_for_the_next_server(
    server: FakeServer, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay_server_client.collector._CLOSE_WAIT_S", 0.05)
    server.holds_credits = True
    collector = attach()
    collector.write(rows(0, 8))
    server.is_silent = True
    server.restart()
    with pytest.raises(ServerGone):
        collector.flush(0.05)

    def come_back() -> None:
        server.is_silent = server.holds_credits = False

    later = threading.Timer(0.2, come_back)
    later.start()
    collector.close()
    later.join()
    assert Ring.of(server).rewards == list(range(8))


def test_a_slot_that_is_filled_in_place_while_the_server_is_lost_is_published_once(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    server.holds_credits = True
    collector.write(rows(0, 4))
    with collector.slot() as slot:
        for name, column in rows(4, 4).items():
            slot[name][:4] = np.asarray(column)
        server.restart()
        slot.rows = 4
    server.holds_credits = False
    collector.write(rows(8, 4))
    collector.flush()
    assert Ring.of(server).rewards == list(range(12))


class Uninterrupted:
    """The same calls against a server that stays."""

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
    calm, harmed = Uninterrupted(run_dir, seed, restarts=False), Uninterrupted(run_dir, seed, restarts=True)
    assert harmed.resumed > 0
    assert harmed.counts == calm.counts
    assert harmed.ring.rewards == calm.ring.rewards
    assert harmed.ring.lanes == calm.ring.lanes
    assert [each.last for each in harmed.ring.episodes] == [each.last for each in calm.ring.episodes]
    assert harmed.ring.returns.count == calm.ring.returns.count
    assert harmed.ring.returns.mean == pytest.approx(calm.ring.returns.mean)


def test_lost_servers_leave_no_memory_and_no_thread_behind(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    for first in range(0, 200, 8):
        server.holds_credits = True
        collector.write(rows(first, 8))
        server.restart()
        server.holds_credits = False
        collector.flush()
    assert Ring.of(server).rewards == list(range(200))
    maps = Path("/proc/self/maps").read_text().count("replay-fake")
    assert maps <= 2 * 26, "one mapping here for each segment of the server, which lives in this process, and one for the newest slots"
    assert threading.active_count() < 10


@pytest.mark.filterwarnings("ignore::ResourceWarning")
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
