"""Promises of the prefetch engine, driven by one thread against a server without sockets and a clock that only moves when told to."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from replay_server_client.conversation import AT_REST_S, IDLE_NAP_S
from replay_server_client.deadline import Deadline
from replay_server_client.draw import Drawn, draw_uniform
from replay_server_client.engine import Engine
from replay_server_client.learner import Learner
from replay_server_client.request import Seeds
from replay_server_protocol.errors import InvalidRequest, ReplayTimeout, ServerClosing, ServerGone
from replay_server_protocol.messages import Bye, Cancel, Explain, Grant, Refused, Sample
from support.clock import FakeClock
from support.granting import LEASE_NS, GrantingConnection, tell_time

Make = Callable[..., Learner]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    tell_time(monkeypatch, clock)
    return clock


@pytest.fixture
def server(clock: FakeClock) -> Iterator[GrantingConnection]:
    server = GrantingConnection(clock)
    yield server
    server.segment.unlink()


@pytest.fixture
def make(server: GrantingConnection) -> Iterator[Make]:
    made: list[Learner] = []

    def make(prefetch: int = 1, name: str = "learner", seed: int = 1) -> Learner:
        driver = Engine(server, "cpu", None)
        driver.attach(Deadline(1))
        made.append(Learner(driver, Seeds(seed, name), prefetch))
        return made[-1]

    yield make
    for learner in made:
        learner.close()


@pytest.fixture
def gather_takes(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes every draw take so many seconds."""

    def takes(seconds: float) -> None:
        def slow(drawn: Drawn, ring_rows: int) -> None:
            draw_uniform(drawn, ring_rows)
            clock.advance(seconds)

        monkeypatch.setattr("replay_server_client.recipe.draw_uniform", slow)

    return takes


def test_batch_holds_the_rows_of_its_seqs(make: Make) -> None:
    batch = make().sample(32)
    assert torch.equal(batch["value"], batch.seqs)
    assert batch.window == (0, 40)
    assert int(batch.seqs.max()) < 40


def test_batches_are_numbered_and_addresses_repeat_with_period_prefetch_plus_one(make: Make) -> None:
    learner = make(prefetch=2)
    seen = []
    for _ in range(7):
        batch = learner.sample(8)
        seen.append((batch.number, batch.buffer, batch["value"].data_ptr()))
    assert [number for number, _, _ in seen] == [1, 2, 3, 4, 5, 6, 7]
    assert [buffer for _, buffer, _ in seen] == [0, 1, 2, 0, 1, 2, 0]
    assert len({address for _, _, address in seen}) == 3
    assert [seen[i][2] for i in range(4)] == [seen[i + 3][2] for i in range(4)]


def test_equal_names_and_seeds_draw_equal_rows_and_other_names_do_not(make: Make) -> None:
    first, same, other = (make(name=name).sample(32).seqs for name in ("a", "a", "b"))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_next_batch_is_asked_for_before_it_is_wanted(make: Make, server: GrantingConnection) -> None:
    learner = make()
    learner.sample(8)
    asked = len(server.of(Sample))
    learner.progress()
    learner.sample(8)
    learner.sample(8)
    assert asked == 2
    assert learner.statistics().waited_s == 0.0


def test_while_every_batch_is_ready_or_lent_no_message_is_awaited(make: Make, server: GrantingConnection) -> None:
    learner = make()
    conversation = learner._engine.conversation
    assert conversation.nap_s() == IDLE_NAP_S  # the ring's
    learner.sample(8)
    learner.progress()
    assert conversation.nap_s() == AT_REST_S
    server.holds = True
    learner.sample(8)
    learner.progress()
    assert conversation.nap_s() == IDLE_NAP_S


@pytest.mark.parametrize(("seq", "took_s"), [(45, 0.0), (0, 0.4)], ids=["rows to come", "rows that are there"])
def test_only_what_a_batch_itself_waits_for_makes_it_slow(
    make: Make, server: GrantingConnection, clock: FakeClock, seq: int, took_s: float
) -> None:
    learner = make()
    sampler = learner.sampler(8)
    sampler.sample()
    learner.progress()
    sampler.sample()
    server.holds, server.committed = True, 45
    sampler.expect(seq)
    clock.advance(0.4)
    server.grant(server.of(Sample)[-1])
    learner.progress()
    assert sampler._prefetch.head_start._ready_ns == took_s * 1e9


def test_a_grant_read_in_expect_is_told_to_the_thread(make: Make, server: GrantingConnection) -> None:
    """Of the socket it hears no more: its nap of half a second would be as long as a lease."""
    learner = make()
    sampler, engine = learner.sampler(8), learner._engine
    sampler.sample()
    server.holds = True
    sampler.sample()
    learner.progress()
    engine._thread = threading.current_thread()
    engine._wake.listen()
    server.grant(server.of(Sample)[-1])
    sampler.expect(0)
    assert select.select([engine._wake.fd], [], [], 0)[0]


def test_without_prefetch_a_batch_is_asked_for_inside_sample_only(make: Make, server: GrantingConnection) -> None:
    learner = make(prefetch=0)
    for number in (1, 2, 3):
        learner.sample(8)
        learner.progress()
        assert [n for n, _ in server.asked()] == list(range(1, number + 1))


def test_batch_ends_with_the_next_sample_of_its_request_only(make: Make) -> None:
    learner = make()
    batch, other = learner.sample(8), learner.sample(4)
    learner.sample(4)
    assert len(batch["value"]) == 8
    with pytest.raises(InvalidRequest, match="ended with the next sample"):
        other["value"]


def test_lent_rows_stay_until_the_next_sample(make: Make, server: GrantingConnection) -> None:
    learner = make()
    batch = learner.sample(32)
    seen = batch["value"].clone()
    server.committed = 60
    for _ in range(5):
        learner.progress()
    assert torch.equal(batch["value"], seen)


def test_lease_is_released_as_used_once_the_gather_is_complete(make: Make, server: GrantingConnection) -> None:
    make(prefetch=0).sample(8)
    assert server.releases() == [(1, True)]


def test_gather_that_ends_exactly_at_the_deadline_counts(make: Make, gather_takes: Callable[[float], None]) -> None:
    gather_takes(LEASE_NS / 1e9)
    assert make(prefetch=0).sample(8).number == 1


def test_late_batch_is_dropped_counted_and_asked_again_with_its_number(
    make: Make, server: GrantingConnection, gather_takes: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    delays = iter([LEASE_NS + 1, 0])

    def late_once(drawn: Drawn, ring_rows: int) -> None:
        draw_uniform(drawn, ring_rows)
        clock.advance_ns(next(delays))

    monkeypatch.setattr("replay_server_client.recipe.draw_uniform", late_once)
    learner = make(prefetch=0)
    batch = learner.sample(8)
    assert batch.number == 1
    assert server.releases() == [(1, False), (2, True)]
    assert [number for number, _ in server.asked()] == [1, 1]
    assert (learner.statistics().late, learner.statistics().dropped, learner.statistics().batches) == (1, 1, 1)


def test_three_late_batches_in_a_row_raise_with_gather_and_lease_time(
    make: Make, server: GrantingConnection, gather_takes: Callable[[float], None]
) -> None:
    gather_takes(0.6)
    with pytest.raises(ReplayTimeout, match=r"gather took 600\.0 ms, a lease lasts 500 ms"):
        make(prefetch=0).sample(8, timeout=60)
    assert len(server.of(Sample)) == 3


def test_grant_that_is_over_when_it_is_read_starts_no_gather(make: Make, server: GrantingConnection, clock: FakeClock) -> None:
    learner = make()
    learner.sample(8)
    learner.sample(8)
    clock.advance(1.0)
    assert learner.sample(8).number == 3
    assert learner.statistics().late == 0


def test_prefetched_batch_older_than_min_committed_is_dropped_and_asked_again(make: Make, server: GrantingConnection) -> None:
    learner = make()
    learner.sample(8)
    learner.progress()
    server.committed = 48
    batch = learner.sample(8, min_committed=48)
    assert batch.window == (0, 48)
    assert batch.number == 2
    assert [asked for asked in server.asked() if asked[0] == 2] == [(2, 0), (2, 48)]
    assert learner.statistics().dropped == 1


def test_waiting_request_is_replaced_when_a_call_wants_fresher_rows(make: Make, server: GrantingConnection) -> None:
    learner = make(prefetch=0)
    server.holds = True
    with pytest.raises(ReplayTimeout):
        learner.sample(8, timeout=0.1)
    with pytest.raises(ReplayTimeout):
        learner.sample(8, min_committed=50, timeout=0.1)
    assert server.asked() == [(1, 0), (1, 50)]


def test_older_grant_that_crossed_a_fresher_request_is_released_unused(make: Make, server: GrantingConnection) -> None:
    learner = make()
    learner.sample(8)
    server.holds = True
    learner.sample(8)
    learner.progress()
    with pytest.raises(ReplayTimeout):
        learner.sample(8, min_committed=50, timeout=0.1)
    server.grant(next(m for m in server.of(Sample) if m.number == 3 and m.min_committed == 0))
    server.holds, server.committed = False, 50
    assert learner.sample(8, min_committed=50, timeout=5.0).window == (2, 50)
    assert server.releases()[2][1] is False


def test_unanswered_request_is_repeated_after_a_second_with_its_number(make: Make, server: GrantingConnection) -> None:
    server.holds = True
    with pytest.raises(ReplayTimeout):
        make(prefetch=0).sample(8, timeout=3.2)
    assert [number for number, _ in server.asked()] == [1, 1, 1, 1]


def test_grant_that_nobody_waits_for_is_released_unused(make: Make, server: GrantingConnection) -> None:
    learner = make(prefetch=0)
    learner.sample(8)
    server.repeat(Grant(1, 1, 1, 1, 9, 0, 40, server.clock.now_ns + LEASE_NS))
    learner.progress()
    assert server.releases() == [(1, True), (9, False)]


def test_repeated_grant_changes_nothing(make: Make, server: GrantingConnection) -> None:
    learner = make()
    learner.sample(8)
    learner.progress()
    server.repeat(Grant(1, 1, 1, 2, 2, 0, 40, server.clock.now_ns + LEASE_NS))
    learner.progress()
    assert server.releases() == [(1, True), (2, True)]


def test_timeout_carries_the_servers_reason_and_comes_in_time(make: Make, server: GrantingConnection, clock: FakeClock) -> None:
    server.holds = True
    learner, before = make(), clock()
    with pytest.raises(ReplayTimeout, match="need 10,000 rows, have 812"):
        learner.sample(8, timeout=0.3)
    assert clock() - before == pytest.approx(0.3, abs=0.02)
    assert server.of(Explain)[-1].what == "sample"


def test_timeout_without_a_ring_asks_why_there_is_none(make: Make, server: GrantingConnection) -> None:
    server.has_ring = False
    with pytest.raises(ReplayTimeout):
        make().sample(8, timeout=0.1)
    assert server.of(Explain)[-1].what == "ring"


def test_timed_out_request_without_prefetch_is_cancelled(make: Make, server: GrantingConnection) -> None:
    learner = make(prefetch=0)
    server.holds = True
    with pytest.raises(ReplayTimeout):
        learner.sample(8, timeout=0.1)
    assert [message.number for message in server.of(Cancel)] == [1]
    server.holds = False
    assert learner.sample(8).number == 1


def test_ring_may_come_after_the_first_call(make: Make, server: GrantingConnection) -> None:
    server.has_ring = False
    learner = make()
    with pytest.raises(ReplayTimeout):
        learner.sample(8, timeout=0.1)
    assert learner.capacity is None
    server.show_ring()
    assert len(learner.sample(8)) == 8
    assert learner.capacity == 48


def test_refused_request_raises_its_typed_error_and_may_be_made_again(make: Make, server: GrantingConnection) -> None:
    learner = make()
    server.refusal = Refused(1, 1, "Sample", 0, 0, "invalid_request", "can dead-end", {"tolerance": 8})
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="can dead-end"):
            learner.sample(8)
    server.refusal = None
    assert learner.sample(8).number == 1


def test_more_rows_than_the_capacity_are_refused_with_both_numbers(make: Make, server: GrantingConnection) -> None:
    with pytest.raises(InvalidRequest, match=r"n=49 .* 48 rows"):
        make().sample(49)
    assert not server.of(Sample)


@pytest.mark.parametrize(
    "arguments", [{"n": 0}, {"n": True}, {"n": 8.0}, {"n": 8, "by": "magic"}, {"n": 8, "max_age_rows": 0}, {"n": 8, "min_committed": -1}]
)
def test_bad_arguments_are_refused_by_name_and_nothing_is_asked(
    make: Make, server: GrantingConnection, arguments: dict[str, object]
) -> None:
    wrong = next((name for name in ("by", "max_age_rows", "min_committed") if name in arguments), "n")
    with pytest.raises(InvalidRequest, match=f"{wrong}="):
        make().sample(**arguments)  # type: ignore[arg-type]
    assert not server.of(Sample)


def test_lost_server_is_attached_to_again_within_the_call_and_buffers_keep_their_addresses(make: Make, server: GrantingConnection) -> None:
    learner = make()
    batch = learner.sample(8)
    seen, address = batch["value"].clone(), batch["value"].data_ptr()
    server.ends = lambda: ServerGone("gone")
    learner.progress()
    assert torch.equal(batch["value"], seen)
    assert learner.sample(8).number == 2
    assert learner.sample(8)["value"].data_ptr() == address
    assert learner.statistics().generations == 2


def test_lease_numbers_of_the_next_server_are_no_repeats_of_the_last_ones(make: Make, server: GrantingConnection) -> None:
    learner = make()
    learner.sample(8)
    for _ in range(3):
        server.ends = lambda: ServerGone("gone")
        learner.progress()
        for _ in range(4):
            learner.sample(8, timeout=0.2)
    assert learner.statistics().batches == 13


def test_closing_server_is_told_bye_after_the_ring_is_unmapped_and_the_next_call_says_so(make: Make, server: GrantingConnection) -> None:
    learner = make()
    batch = learner.sample(8)
    seen = batch["value"].clone()
    server.ends = lambda: ServerClosing("closing")
    learner.progress()
    assert learner.schema is None
    assert torch.equal(batch["value"], seen)
    with pytest.raises(ServerClosing):
        learner.sample(8)
    assert learner.sample(8).number == 2


def test_batches_end_when_the_server_closes(make: Make, server: GrantingConnection) -> None:
    numbers = []
    for batch in make().batches(8):
        numbers.append(batch.number)
        if batch.number == 3:
            server.ends = lambda: ServerClosing("closing")
    assert numbers[:3] == [1, 2, 3]
    assert len(numbers) <= 4


def test_wait_ready_asks_for_one_row_and_uses_none(make: Make, server: GrantingConnection) -> None:
    make().wait_ready(1.0)
    assert [message.rows for message in server.of(Sample)] == [1]
    assert server.releases() == [(1, False)]


def test_wait_ready_names_what_is_missing_and_takes_its_request_back(make: Make, server: GrantingConnection) -> None:
    server.holds = True
    with pytest.raises(ReplayTimeout, match="need 10,000 rows"):
        make().wait_ready(0.2)
    assert len(server.of(Cancel)) == 1


def test_closed_learner_keeps_its_batches_and_refuses_calls(make: Make, server: GrantingConnection) -> None:
    learner = make()
    batch = learner.sample(8)
    seen = batch["value"].clone()
    learner.close()
    learner.close()
    assert torch.equal(batch["value"], seen)
    with pytest.raises(ServerGone, match="closed"):
        learner.sample(8)
    assert not server.of(Bye)  # say_bye writes to the socket itself
