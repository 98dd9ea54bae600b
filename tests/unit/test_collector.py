"""The collector's promises, against a server that holds back, loses or forgets what the test says."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from replay_server_client import (
    AttachRefused,
    BudgetExceeded,
    Collector,
    ForkedClient,
    InvalidRequest,
    ReplayTimeout,
    RowsRejected,
    Schema,
    ServerClosing,
    ServerGone,
    ingress,
)
from replay_server_protocol.messages import Bye, Explain, Mapped, Publish
from replay_server_protocol.versions import unpack_versions
from support.fake_server import FakeServer
from support.leaks import nothing_left

SCHEMA = Schema.of(reward="float32", obs=("float32", 3))
SLACK_S = 0.1
"""What a busy machine may add to a wait."""

Attach = Callable[..., Collector]


@pytest.fixture
def server(run_dir: Path) -> Iterator[FakeServer]:
    with nothing_left(), FakeServer(run_dir) as fake:
        yield fake


@pytest.fixture
def attach(server: FakeServer) -> Iterator[Attach]:
    attached: list[Collector] = []

    def connect(**options: object) -> Collector:
        wanted: dict[str, object] = {"lanes": 2, "linger": 60.0, "timeout": 5.0} | options
        attached.append(Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, **wanted))  # type: ignore[arg-type]
        return attached[-1]

    yield connect
    server.hold_no_more()
    for collector in attached:
        try:
            collector.close()
        except ServerGone:
            continue


@pytest.fixture
def patient_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is waited for as long as it takes: 15 ms are short for a thread of this process on a busy machine."""
    monkeypatch.setattr(ingress, "_REASON_WAIT_S", 5.0)


def rows(first: int, n: int) -> dict[str, object]:
    reward = np.arange(first, first + n, dtype=np.float32)
    return {"reward": reward, "obs": np.repeat(reward[:, None], 3, 1)}


def test_slots_that_can_not_be_pinned_are_refused_where_they_must_be(server: FakeServer, attach: Attach) -> None:
    server.copied_as = "pageable: cudaErrorMemoryAllocation"
    with pytest.raises(AttachRefused, match=r"require_zero_copy: .*copies these slots pageable: cudaErrorMemoryAllocation.*ulimit -l"):
        attach(require_zero_copy=True)
    attach().write(rows(0, 2))
    server.copied_as = "pinned"
    attach(require_zero_copy=True).write(rows(0, 2))


def test_flush_returns_a_seq_that_covers_all_rows(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 4))
    assert collector.flush() == 4
    collector.write(rows(4, 40))
    assert collector.flush() == 44
    assert server.rows("reward").tolist() == list(range(44))
    assert server.rows("obs")[:, 2].tolist() == list(range(44))


def test_publishes_are_numbered_from_one(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 48))
    collector.flush()
    publishes = server.of(Publish)
    assert [message.number for message in publishes if isinstance(message, Publish)] == [1, 2, 3]
    assert collector.statistics().publishes == 3


def test_part_filled_slot_is_kept_open_until_linger_has_passed(server: FakeServer, attach: Attach) -> None:
    patient, hasty = attach(), attach(linger=0.0)
    patient.write(rows(0, 4))
    assert server.of(Publish) == []
    hasty.write(rows(0, 4))
    assert len(server.of(Publish)) == 1


def test_slot_is_not_written_again_before_its_credit(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    server.holds_credits = True
    with pytest.raises(ReplayTimeout) as late:
        collector.write(rows(0, 40), timeout=0.05)
    assert late.value.rows_written == 32
    assert server.rows("reward").tolist() == list(range(32))
    assert collector.statistics().free_slots == 0
    server.credit()
    collector.write(rows(32, 8))
    collector.write(rows(40, 8))
    server.settle()
    assert server.rows("reward").tolist() == list(range(48))


@pytest.mark.parametrize("timeout", [0.0, 0.1, 0.5])
def test_late_write_raises_in_time(server: FakeServer, attach: Attach, timeout: float) -> None:
    collector = attach()
    server.holds_credits = True
    collector.write(rows(0, 32))
    before = time.monotonic()
    with pytest.raises(ReplayTimeout, match="no credit: all 2 slots are published"):
        collector.write(rows(32, 2), timeout=timeout)
    assert timeout <= time.monotonic() - before < timeout + max(0.02, 0.1 * timeout) + SLACK_S


def test_late_write_names_the_servers_reason(server: FakeServer, attach: Attach, patient_reason: None) -> None:
    collector = attach()
    server.holds_credits = True
    collector.write(rows(0, 32))
    with pytest.raises(ReplayTimeout, match="the test holds it back"):
        collector.write(rows(32, 2), timeout=0.0)
    assert [message.what for message in server.of(Explain) if isinstance(message, Explain)] == ["credit"]


def test_late_flush_against_a_stopped_server_raises_in_time(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 2))
    server.is_silent = True
    before = time.monotonic()
    with pytest.raises(ReplayTimeout, match=r"not committed.*does not answer"):
        collector.flush(timeout=0.2)
    assert time.monotonic() - before < 0.22 + SLACK_S
    server.is_silent = False
    assert collector.flush(timeout=5.0) == 2  # the publish was lost and is repeated


def test_timed_out_write_cuts_every_lane(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    server.holds_credits = True
    with pytest.raises(ReplayTimeout):
        collector.write(rows(0, 34), timeout=0.0)
    server.credit()
    collector.write(rows(34, 2))
    server.holds_credits = False
    collector.flush()
    assert [np.frombuffer(taken.message.lanes, np.int32).tolist() for taken in server.taken] == [[], [], [~0, ~1]]


def test_lost_publish_is_repeated_after_a_second_and_taken_once(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    server.drops = 1
    collector.write(rows(0, 4))
    assert collector.flush() == 4
    assert server.rows("reward").tolist() == [0, 1, 2, 3]
    assert collector.statistics().repeats == 1


def test_wait_publishes_the_open_slot_first(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 4))
    server.is_silent = True
    with pytest.raises(ReplayTimeout):
        collector.latest("policy", timeout=0.01)
    assert collector.statistics().publishes == 1
    server.is_silent = False


def test_rejected_write_leaves_everything_as_it_was(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 2))
    before = collector.statistics()
    with pytest.raises(RowsRejected):
        collector.write(rows(2, 2) | {"obs": np.zeros((2, 3))})
    assert collector.statistics() == before
    collector.flush()
    assert server.rows("reward").tolist() == [0, 1]


def test_masked_and_rejected_rows_are_told_with_the_next_publish(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 4) | {"reward": np.array([0, np.nan, 2, 3], np.float32)}, mask=np.array([True, True, True, False]))
    assert collector.flush() == 2
    (taken,) = server.taken
    assert (taken.message.rows, taken.message.masked, taken.message.rejected) == (2, 1, 1)
    statistics = collector.statistics()
    assert (statistics.rows_written, statistics.rows_committed, statistics.rows_rejected, statistics.rows_masked) == (3, 2, 1, 1)


def test_slot_without_a_row_left_still_tells_which_row_was_rejected(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 2))
    assert collector.flush() == 2
    collector.write(rows(2, 2) | {"reward": np.full(2, np.nan, np.float32)})
    assert collector.flush() == 2
    collector.write(rows(4, 2) | {"reward": np.array([4, np.inf], np.float32)})
    assert collector.flush() == 3
    told = [(t.message.rows, t.message.rejected, t.message.nonfinite_field, t.message.nonfinite_row) for t in server.taken]
    assert told == [(2, 0, "", 0), (0, 2, "reward", 2), (1, 1, "reward", 5)]


def test_lent_slot_is_published_at_the_end_of_its_block(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 2))
    with collector.slot() as slot:
        slot["reward"][:4] = np.arange(2, 6)
        slot["obs"][:4] = 0
        slot.rows = 4
        with pytest.raises(InvalidRequest, match="leave its with block"):
            collector.write(rows(0, 2))
    assert collector.flush() == 6
    assert server.rows("reward").tolist() == [0, 1, 2, 3, 4, 5]


def test_exception_in_a_lent_slot_publishes_nothing_and_frees_it(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    for _ in range(3):
        with pytest.raises(KeyError), collector.slot() as slot:
            slot.rows = 2
            raise KeyError
    with pytest.raises(RowsRejected, match="was not set"), collector.slot():
        pass
    with collector.slot() as slot:
        slot.rows = 0
    assert collector.statistics().free_slots == 2
    assert server.of(Publish) == []


def test_slot_waits_for_a_credit_at_most_its_timeout(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    server.holds_credits = True
    collector.write(rows(0, 32))
    with pytest.raises(ReplayTimeout, match="no credit"), collector.slot(timeout=0.05):
        pytest.fail("there was no credit")


@pytest.mark.parametrize("lanes", [1, [1], np.array([False, True]), np.array([1], np.int8)])
def test_cut_names_lanes_by_number_or_mask(server: FakeServer, attach: Attach, lanes: object) -> None:
    collector = attach()
    collector.write(rows(0, 2))
    collector.cut(lanes)
    collector.write(rows(2, 2))
    collector.flush()
    assert np.frombuffer(server.taken[0].message.lanes, np.int32).tolist() == [0, 1, 0, ~1]


@pytest.mark.parametrize("lanes", [2, -1, [0.5], np.array([True]), [[0]]])
def test_cut_of_no_such_lane_is_refused(attach: Attach, lanes: object) -> None:
    collector = attach()
    with pytest.raises(InvalidRequest, match=r"numbers from 0 to 1, or bool\[2\]"):
        collector.cut(lanes)


def test_restarted_server_costs_rows_in_flight_and_nothing_more(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 4))
    collector.flush()
    server.holds_credits = True
    collector.write(rows(4, 16))
    collector.write(rows(20, 2))
    server.restart()
    server.holds_credits = False
    collector.write(rows(22, 32))  # fills the open slot, notices the loss, attaches again and goes on
    assert server.generation == 2
    with pytest.raises(ServerGone, match="32 rows") as gone:
        collector.flush()
    assert gone.value.details["rows_lost"] == 32
    assert collector.flush() == 18
    statistics = collector.statistics()
    assert (statistics.rows_written, statistics.rows_committed, statistics.rows_lost) == (54, 22, 32)
    told = [message.rows_lost for message in server.of(Mapped) if isinstance(message, Mapped)]
    assert told == [0, 32]
    first = next(t.message for t in server.taken if t.message.generation == 2)
    assert (first.number, np.frombuffer(first.lanes, np.int32)[:2].tolist()) == (1, [~0, ~1])


def test_flush_that_meets_the_loss_itself_names_it_and_the_next_one_works(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 4))
    server.restart()
    with pytest.raises(ServerGone, match="4 rows"):
        collector.flush()
    collector.write(rows(4, 2))
    assert collector.flush() == 2


def test_closing_server_is_told_to_the_caller_and_left(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    server.holds_credits = True
    collector.write(rows(0, 32))
    server.close_in_good_order()
    with pytest.raises(ServerClosing):
        collector.write(rows(32, 2))
    assert len(server.of(Bye)) == 1
    assert collector.statistics().rows_lost == 32
    server.holds_credits = False
    collector.write(rows(32, 2))
    with pytest.raises(ServerGone, match="32 rows"):
        collector.flush()


def test_waiting_write_goes_on_when_its_credit_comes(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    server.holds_credits = True
    collector.write(rows(0, 32))
    later = threading.Timer(0.05, server.credit)
    later.start()
    collector.write(rows(32, 2))
    later.join()
    assert collector.statistics().waited_s > 0


def test_connect_without_a_server_raises_in_time(run_dir: Path) -> None:
    with nothing_left():
        before = time.monotonic()
        with pytest.raises(ServerGone, match="replay-server serve --name nobody"):
            Collector.connect("nobody", schema=SCHEMA, run_dir=run_dir, timeout=0.2)
        assert time.monotonic() - before < 0.22 + SLACK_S


def test_connect_whose_ring_never_comes_names_the_servers_reason(server: FakeServer, attach: Attach, patient_reason: None) -> None:
    server.lends = False
    with pytest.raises(ReplayTimeout, match=r"no slots were lent.*the test holds it back"):
        attach(timeout=0.1)
    assert len(server.of(Bye)) == 1


def test_refusal_reaches_the_caller_as_its_own_class(server: FakeServer, attach: Attach) -> None:
    server.refusal = ("budget_exceeded", "too large by 3 bytes")
    with pytest.raises(BudgetExceeded, match="too large by 3 bytes"):
        attach()


@pytest.mark.parametrize(
    "wrong", [{"lanes": 0}, {"lanes": True}, {"linger": -1.0}, {"linger": "x"}, {"name": "no/slash"}, {"name": 3}, {"timeout": -1.0}]
)
def test_wrong_arguments_are_refused_before_anything_is_sent(server: FakeServer, attach: Attach, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        attach(**wrong)
    assert server.received == []


def test_close_publishes_waits_and_says_bye_once(server: FakeServer, attach: Attach) -> None:
    with attach() as collector:
        collector.write(rows(0, 2))
    collector.close()
    assert server.rows("reward").tolist() == [0, 1]
    assert len(server.of(Bye)) == 1
    assert collector.statistics().rows_committed == 2
    with pytest.raises(InvalidRequest, match="is closed"):
        collector.write(rows(0, 2))


def test_error_in_the_block_is_the_one_that_is_told(server: FakeServer, attach: Attach) -> None:
    with pytest.raises(KeyError), attach() as collector:
        collector.write(rows(0, 2))
        server.restart()
        raise KeyError


def test_dropped_collector_says_bye(server: FakeServer) -> None:
    collector = Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir)
    gone = weakref.ref(collector)
    del collector
    gc.collect()
    assert gone() is None
    server.settle()
    assert len(server.of(Bye)) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_forked_child_is_refused_and_leaves_the_parents_session_alone(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(rows(0, 2))
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: collector.write(rows(0, 2)), collector.flush, lambda: collector.cut(0), collector.statistics):
            try:
                call()
            except ForkedClient:
                refused += 1
        collector.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert collector.flush() == 2
    assert server.of(Bye) == []


@pytest.mark.parametrize("newer_than", ["1", 1.5, None, True])
def test_a_version_that_is_no_number_is_refused_before_anything_is_asked(attach: Attach, newer_than: object) -> None:
    with pytest.raises(InvalidRequest, match="newer_than="):
        attach().latest("policy", newer_than=newer_than)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", ["2", 1.5, None, True])
def test_slot_rows_that_are_no_number_are_refused_by_name(attach: Attach, rows: object) -> None:
    with pytest.raises(RowsRejected, match=r"slot\.rows = "), attach(lanes=1).slot() as slot:
        slot.rows = rows  # type: ignore[assignment]


STAMPED = Schema.of(reward="float32", policy_version="int32")


def test_rows_without_a_version_get_the_collectors_own(server: FakeServer) -> None:
    with Collector.connect(server.name, schema=STAMPED, run_dir=server.run_dir, lanes=2, linger=60.0) as collector:
        reward = np.zeros(2, np.float32)
        collector.write({"reward": reward})
        collector.policy_version = 7
        collector.write({"reward": reward}, mask=np.array([True, False]))
        collector.write({"reward": reward, "policy_version": np.array([3, 4], np.int32)})
        assert collector.flush() == 5
        with collector.slot() as slot:
            slot["reward"][:2] = 1
            slot.rows = 2
        with collector.slot() as slot:
            slot["reward"][:2], slot["policy_version"][:2] = 1, 9
            slot.rows = 2
        collector.flush()
        columns = [STAMPED["policy_version"].view(taken.rows).tolist() for taken in server.taken]
        assert columns == [[0, 0, 7, 3, 4], [7, 7], [9, 9]]
        assert unpack_versions(server.taken[0].message.versions) == [(0, 2), (3, 1), (4, 1), (7, 1)]
        assert server.taken[0].message.mailbox == ""


def test_a_version_beyond_its_field_is_refused_and_nothing_is_written(server: FakeServer) -> None:
    with Collector.connect(server.name, schema=STAMPED, run_dir=server.run_dir) as collector:
        collector.policy_version = 2**31
        with pytest.raises(RowsRejected, match="beyond its field's dtype int32"):
            collector.write({"reward": np.zeros(1, np.float32)})
        for wrong in (-1, True, 1.0, 2**63):
            with pytest.raises(InvalidRequest, match="policy_version"):
                collector.policy_version = wrong  # type: ignore[assignment]
        assert collector.statistics().rows_written == 0


def test_a_version_comes_first_in_a_schema_and_still_counts_no_rows(server: FakeServer) -> None:
    schema = Schema.of(policy_version="uint64", reward="float32")
    with Collector.connect(server.name, schema=schema, run_dir=server.run_dir, lanes=2) as collector:
        with pytest.raises(RowsRejected, match=r"3 rows \(by field 'reward'\)"):
            collector.write({"reward": np.zeros(3, np.float32)})
        collector.write({"reward": np.zeros(4, np.float32)})
        assert collector.flush() == 4
