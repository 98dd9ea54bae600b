"""A server that passes rows on may be lost: what it had not credited goes to its successor, once, in order, before anything new."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from replay_server_client import Collector, ReplayTimeout, SchemaMismatch, ServerClosing, ServerGone
from replay_server_protocol.messages import Mapped, Publish
from support.fake_server import FakeServer
from support.leaks import nothing_left
from support.resumed import LANES, SCHEMA, Ring, rows

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


def test_a_write_that_the_next_server_refuses_in_its_midst_says_how_much_it_took(server: FakeServer, attach: Attach) -> None:
    server.holds_credits = True
    collector = attach()
    collector.write(rows(0, 8))

    def refuse() -> None:
        server.refusal = ("schema_mismatch", "field 'reward' is float64 there")
        server.restart()

    later = threading.Timer(0.1, refuse)
    later.start()
    with pytest.raises(SchemaMismatch) as refused:
        collector.write(rows(8, 8))  # the first half fills the last free slot
    later.join()
    assert refused.value.rows_written == 4
    server.refusal, server.holds_credits = None, False
    collector.write(rows(12, 4))
    collector.flush()
    ring = Ring.of(server)
    assert ring.rewards == list(range(16))
    assert ring.lanes[-4:] == [~0, ~1, 0, 1], "the next write need not be the next step"


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


def test_rows_left_out_that_no_publish_had_told_of_are_told_by_the_next_servers_first(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 8))
    collector.flush()
    collector.write(rows(8, 6), mask=np.zeros(6, np.bool_))
    server.restart()
    collector.write(rows(14, 4))
    collector.flush()
    assert [taken.message.masked for taken in server.taken] == [0, 0, 6]


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
