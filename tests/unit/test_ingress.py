"""From published slots to committed rows, against a plain list of everything that arrived."""

from __future__ import annotations

import random

import numpy as np
import pytest
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.moments import Moments
from support.held_ring import Bench, publish

from replay_server.credit import Verdict
from replay_server.flow import Flow, FlowState
from replay_server.leases import Lease
from replay_server.sessions import CollectorSession


class Simulation:
    """Random collectors, learners and copy delays; ``rows`` is the model: every row taken, in order of arrival."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.slot_rows = rng.randint(1, 8)
        self.bench = Bench(rng.randint(1, 30), rng.randint(self.slot_rows, 20))
        self.collectors = [self.bench.collector(self.slot_rows, rng.randint(1, 3)) for _ in range(rng.randint(1, 4))]
        self.rows: list[int] = []
        self.leases: list[Lease] = []
        self.rejected = 0

    def step(self) -> None:
        rng = self.rng
        rng.choice((self.publish, self.publish, self.publish_badly, self.repeat, self.lease, self.release))()
        if rng.random() < 0.7:
            self.bench.ingress.drain(0)
        self.bench.memory.complete(rng.randint(0, 3))
        self.bench.ingress.commit(0)
        self.check()

    def publish(self) -> None:
        collector = self.rng.choice(self.collectors)
        free = free_slots(collector)
        if not free:
            return
        slot, values = self.rng.choice(free), [len(self.rows) + i + 1 for i in range(self.rng.randint(0, self.slot_rows))]
        self.bench.fill(collector, slot, values)
        assert self.bench.ingress.accept(collector, publish(collector.credits.taken + 1, slot, len(values)), 0) is Verdict.NEW
        self.rows += values

    def publish_badly(self) -> None:
        """More rows than a slot has: rejected as many as the slot could hold, in its turn."""
        collector = self.rng.choice(self.collectors)
        free = free_slots(collector)
        if free:
            with pytest.raises(ProtocolViolation, match="don't fit a slot"):
                self.bench.ingress.accept(collector, publish(collector.credits.taken + 1, free[0], self.slot_rows + 1), 0)
            self.rejected += self.slot_rows

    def repeat(self) -> None:
        collector = self.rng.choice(self.collectors)
        taken = collector.credits.taken
        if taken:
            assert self.bench.ingress.accept(collector, publish(self.rng.randint(1, taken), 0, 1), 0) is Verdict.REPEAT
        assert self.bench.ingress.accept(collector, publish(taken + 2, 0, 1), 0) is Verdict.GAP

    def lease(self) -> None:
        ring = self.bench.ring
        if ring.size and len(self.leases) < 3:
            self.leases.append(self.bench.leases.open(1, 0, 0, 1, (ring.tail, ring.committed), 0))

    def release(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.bench.leases.release(lease.lease, 1)

    def check(self) -> None:
        bench, ring = self.bench, self.bench.ring
        assert bench.values(ring.tail, ring.committed) == self.rows[ring.tail : ring.committed]
        for lease in self.leases:
            assert bench.values(lease.tail, lease.committed) == self.rows[lease.tail : lease.committed]
        counters = bench.counters
        in_flight = bench.ingress.waiting_rows + ring.in_flight
        assert counters.rows_published == len(self.rows) + self.rejected
        assert counters.rows_published == counters.rows_committed + counters.rows_rejected + in_flight
        assert counters.rows_committed == ring.committed == sum(c.committed_rows for c in self.collectors)
        assert counters.rows_rejected == self.rejected
        assert bench.ingress.is_consistent()
        occupied = bench.ingress.waiting_slots + bench.ingress.slots_in_flight
        assert (
            occupied == sum(len(c.credits.slots) - c.credits.outstanding for c in self.collectors) == sum(c.queued for c in self.collectors)
        )


def free_slots(collector: CollectorSession) -> list[int]:
    return [slot for slot, state in enumerate(collector.credits.slots) if state.value == "free"]


@pytest.mark.parametrize("seed", range(30))
def test_windows_and_leases_always_show_the_rows_in_order_of_arrival(seed: int) -> None:
    simulation = Simulation(seed)
    for _ in range(300):
        simulation.step()
    bench = simulation.bench
    while simulation.leases:
        simulation.release()
    while bench.ingress.waiting_slots or bench.ingress.slots_in_flight:
        assert bench.ingress.drain(0) or bench.memory.held
        bench.memory.complete(1)
        bench.ingress.commit(0)
    simulation.check()
    assert bench.ring.committed == len(simulation.rows)


def test_rows_are_not_visible_and_no_credit_returns_before_the_copy_is_seen_complete() -> None:
    bench = Bench(8, 4)
    collector = bench.collector(4)
    bench.fill(collector, 0, [1, 2, 3])
    bench.ingress.accept(collector, publish(1, 0, 3), 0)
    assert bench.ingress.drain(0) == 1
    assert bench.ingress.commit(0) == []
    assert (bench.ring.committed, collector.credits.outstanding) == (0, 1)
    bench.memory.complete(1)
    assert bench.ring.committed == 0, "complete is not yet seen"
    assert bench.ingress.commit(0) == [collector]
    assert (bench.ring.committed, collector.credits.outstanding, collector.last_committed_seq) == (3, 2, 3)


def test_publish_without_credit_raises_and_changes_nothing() -> None:
    bench = Bench(8, 4)
    collector = bench.collector(2)
    bench.ingress.accept(collector, publish(1, 0, 2), 0)
    with pytest.raises(ProtocolViolation, match="its credit was not returned"):
        bench.ingress.accept(collector, publish(2, 0, 2, rejected=5), 0)
    assert (bench.counters.rows_published, bench.counters.rows_rejected, collector.credits.taken) == (2, 0, 1)
    assert bench.ingress.accept(collector, publish(2, 1, 2), 0) is Verdict.NEW


def test_the_first_slot_that_does_not_fit_stops_the_drain_even_for_smaller_ones() -> None:
    bench = Bench(4, 4)
    large, small = bench.collector(4), bench.collector(1)
    for number in (1, 2):
        bench.ingress.accept(large, publish(number, number - 1, 4), 0)
    assert bench.ingress.drain(0) == 2
    bench.memory.complete(2)
    bench.ingress.commit(0)
    lease = bench.leases.open(1, 0, 0, 1, (bench.ring.tail, bench.ring.committed), 0)
    bench.ingress.accept(large, publish(3, 0, 4), 0)
    bench.ingress.drain(0)
    bench.memory.complete(1)
    bench.ingress.commit(0)
    bench.ingress.accept(large, publish(4, 1, 4), 0)
    bench.ingress.accept(small, publish(1, 0, 1), 0)
    assert bench.ingress.drain(7) == 0
    assert bench.ingress.blocked_since_ns == 7
    assert f"lease {lease.lease} of session 1" in str(bench.ingress.why_blocked())
    bench.leases.release(lease.lease, 1)
    assert bench.ingress.drain(8) == 1, "the large one goes first; the small one waits for its commit"
    bench.memory.complete(1)
    bench.ingress.commit(0)
    assert bench.ingress.drain(9) == 1
    assert bench.ingress.blocked_since_ns is None


def test_the_limiter_holds_back_counted_collectors_only() -> None:
    bench = Bench(100, 20, flow=Flow(0, 1.0, 4))
    counted, free = bench.collector(4), bench.collector(4, counted=False)
    bench.ingress.accept(free, publish(1, 0, 4), 0)
    bench.ingress.accept(counted, publish(1, 0, 4), 0)
    bench.ingress.accept(counted, publish(2, 1, 1), 0)
    assert bench.ingress.drain(0) == 2
    assert "learners must sample 1 more rows" in str(bench.ingress.why_blocked())
    bench.flow.sample(1)
    assert bench.ingress.drain(0) == 1


def test_what_stops_the_drain_is_told_apart_and_gone_once_the_next_drain_can_go_on() -> None:
    bench = Bench(8, 4, flow=Flow(0, 1.0, 12))
    collector = bench.collector(4, 6)
    ingress = bench.ingress
    for number in range(1, 5):
        ingress.accept(collector, publish(number, number - 1, 4), 0)
    assert ingress.blocked_by() is None, "nobody has tried yet"
    assert ingress.drain(0) == 3
    ingress.drain(0)
    assert ingress.blocked_by() is FlowState.COLLECTORS_WAIT_FOR_SAMPLES
    bench.flow.sample(4)
    assert ingress.blocked_by() is FlowState.COLLECTORS_WAIT_FOR_COPIES, "12 of 12 ring rows are reserved"
    bench.memory.complete(2)
    ingress.commit(0)
    lease = bench.leases.open(1, 0, 0, 1, (bench.ring.tail, bench.ring.committed), 0)
    bench.memory.complete(1)
    ingress.commit(0)
    assert ingress.blocked_by() is FlowState.COLLECTORS_WAIT_FOR_LEASE
    bench.leases.release(lease.lease, 1)
    assert ingress.blocked_by() is None
    assert ingress.drain(0) == 1
    assert ingress.blocked_by() is None


def test_rows_take_no_learners_turn_before_their_copies_are_seen_complete() -> None:
    bench = Bench(100, 20, flow=Flow(0, 2.0, 8))
    collector = bench.collector(4)
    bench.ingress.accept(collector, publish(1, 0, 4), 0)
    bench.ingress.drain(0)
    bench.flow.sample(8)
    assert bench.flow.sample_waits_for(8, 100, 0) is FlowState.LEARNERS_WAIT_FOR_INSERTS
    bench.memory.complete(1)
    bench.ingress.commit(0)
    assert bench.flow.sample_waits_for(8, 100, 0) is None


def test_a_lone_write_is_seen_in_order_with_the_copies() -> None:
    bench = Bench(8, 4)
    collector = bench.collector(2)
    seen: list[int] = []
    bench.ingress.accept(collector, publish(1, 0, 2), 0)
    bench.ingress.drain(0)
    bench.ingress.write(bench.layout.proof, b"proof", lambda: seen.append(bench.ring.committed))
    bench.memory.complete(1)
    bench.ingress.commit(0)
    assert seen == []
    bench.memory.complete(1)
    bench.ingress.commit(0)
    assert seen == [2]
    assert bytes(bench.memory.bytes[bench.layout.proof : bench.layout.proof + 5]) == b"proof"


def test_moments_are_noted_once_committed_and_wrong_ones_reject_the_rows() -> None:
    bench = Bench(20, 8, keeps_moments=True)
    collector = bench.collector(4, 3)
    packed = Moments.of(np.array([1.0, 3.0], np.float32)).pack()
    bench.ingress.accept(collector, publish(1, 0, 2, moments=[packed]), 0)
    for number, wrong in ((2, [packed, packed]), (3, [b"short"])):
        with pytest.raises(ProtocolViolation, match="moments"):
            bench.ingress.accept(collector, publish(number, number - 1, 2, moments=wrong), 0)
    bench.ingress.drain(0)
    bench.ingress.note()
    assert bench.tallies[0].report()["count"] == 0
    bench.memory.complete(3)
    bench.ingress.commit(0)
    for _ in range(2):
        bench.ingress.note()
    assert bench.tallies[0].report() == {"count": 2, "mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0}
    assert (bench.counters.rows_committed, bench.counters.rows_rejected, collector.credits.outstanding) == (2, 4, 3)


def test_rows_a_client_rejected_or_masked_are_counted_once() -> None:
    bench = Bench(20, 8)
    collector = bench.collector(4)
    bench.ingress.accept(collector, publish(1, 0, 2, rejected=3, masked=5), 0)
    bench.ingress.accept(collector, publish(1, 0, 2, rejected=3, masked=5), 0)
    counters = bench.counters
    assert (counters.rows_published, counters.rows_rejected, counters.rows_masked) == (5, 3, 5)
