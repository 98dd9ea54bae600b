"""Delivery over calls that fail, answer late or not at all, against receivers that die: every publish is committed once, in order."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from replay_server_client.ray.delivery import Chunk, Delivery, Part
from replay_server_protocol.origins import Origins, Turn


def part(number: int, n_bytes: int = 10, origin: str = "a") -> Part[None]:
    return Part(origin, number, n_bytes, None)


def offered(count: int, **options: float) -> Delivery[None]:
    delivery: Delivery[None] = Delivery(chunk_bytes=20, **options)  # type: ignore[arg-type]
    for number in range(1, count + 1):
        delivery.offer(part(number), 0.0)
    return delivery


def test_no_more_than_four_chunks_are_in_flight() -> None:
    delivery = offered(20)
    chunks = [delivery.next_chunk(0.0) for _ in range(4)]
    assert [[p.number for p in chunk.parts] for chunk in chunks if chunk] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert delivery.next_chunk(9.0) is None
    assert [p.number for p in delivery.settle(1, {"a": 2}, 0.0)] == [1, 2]
    assert delivery.next_chunk(0.0) is not None


def test_small_parts_go_at_once_when_nothing_is_on_its_way_and_are_gathered_else() -> None:
    delivery: Delivery[None] = Delivery(chunk_bytes=100, linger_s=0.5)
    delivery.offer(part(1), 0.0)
    assert delivery.next_chunk(0.0) is not None
    delivery.offer(part(2), 1.0)
    assert delivery.next_chunk(1.4) is None
    delivery.offer(part(3), 1.4)
    chunk = delivery.next_chunk(1.5)
    assert chunk is not None
    assert [p.number for p in chunk.parts] == [2, 3]


def test_after_a_failure_all_without_an_answer_go_again_in_order_once_the_rest_has_settled() -> None:
    delivery = offered(8)
    one, two, three = (delivery.next_chunk(0.0) for _ in range(3))
    assert one is not None
    assert two is not None
    assert three is not None
    assert delivery.settle(one.ordinal, None, 1.0) == []
    assert delivery.next_chunk(9.0) is None
    delivery.settle(two.ordinal, {"a": 0}, 1.0)
    delivery.settle(three.ordinal, None, 1.0)
    assert delivery.next_chunk(1.0) is None
    again = delivery.next_chunk(1.0 + 0.05 * 4)
    assert again is not None
    assert [p.number for p in again.parts] == [1, 2]
    assert again.firsts == {"a": 1}
    assert delivery.parts_sent_again == 6


def test_an_answer_that_covers_a_chunk_whose_own_call_failed_counts() -> None:
    delivery = offered(4)
    one, two = delivery.next_chunk(0.0), delivery.next_chunk(0.0)
    assert one is not None
    assert two is not None
    assert delivery.settle(one.ordinal, None, 0.0) == []
    assert [p.number for p in delivery.settle(two.ordinal, {"a": 4}, 0.0)] == [1, 2, 3, 4]
    assert delivery.unanswered == 0


def test_waits_between_failures_grow_to_a_second_and_end_with_a_success() -> None:
    delivery = offered(2)
    now, waits = 0.0, []
    for _ in range(8):
        chunk = delivery.next_chunk(now)
        assert chunk is not None
        delivery.settle(chunk.ordinal, None, now)
        waits.append(delivery.next_at_s() - now)
        now = delivery.next_at_s()
    assert waits == sorted(waits)
    assert waits[0] == pytest.approx(0.05)
    assert waits[-1] == pytest.approx(1.0)


def test_an_answer_without_a_commit_is_asked_for_again_at_once_however_often() -> None:
    delivery, now = offered(2), 0.0
    for _ in range(8):
        chunk = delivery.next_chunk(now)
        assert chunk is not None
        now += 2.0  # the host waited for a credit
        delivery.settle(chunk.ordinal, {"a": 0}, now)
        assert delivery.next_at_s() - now == pytest.approx(0.05)
        now = delivery.next_at_s()


def test_a_forgotten_origin_leaves_nothing_behind() -> None:
    delivery = offered(1)
    delivery.forget("a")
    assert delivery.origins == 1
    chunk = delivery.next_chunk(0.0)
    assert chunk is not None
    delivery.settle(chunk.ordinal, {"a": 1}, 0.0)
    delivery.forget("a")
    assert delivery.origins == 0


class Receivers:
    """A host that may die at any point of a call, and the sidecar behind it, which lives on: ``committed`` is its ring."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.committed: list[tuple[str, int]] = []
        self._sidecar = Origins()
        self._host = Origins()

    def kill_host(self) -> None:
        self._host = Origins()

    def call(self, chunk: Chunk[None], dies: bool) -> dict[str, int] | None:
        """The answer, None if the host died on the way: after any number of its publishes."""
        ends_after = self.rng.randrange(len(chunk.parts) + 1) if dies else None
        through: dict[str, int] = {}
        for done, each in enumerate(chunk.parts):
            if done == ends_after:
                self.kill_host()
                return None
            first = chunk.firsts[each.origin]
            if self._host.judge(each.origin, each.number, first) is Turn.NEXT:
                self._host.take(each.origin, each.number)
                if self._sidecar.judge(each.origin, each.number, first) is Turn.NEXT:
                    self._sidecar.take(each.origin, each.number)
                    self.committed.append((each.origin, each.number))
            through[each.origin] = self._host.last(each.origin, first)
        return None if dies else through


@pytest.mark.parametrize("seed", range(40))
def test_every_publish_is_committed_once_and_in_order_whatever_dies(seed: int) -> None:
    rng = random.Random(seed)
    delivery: Delivery[None] = Delivery(window_chunks=rng.randint(1, 6), chunk_bytes=rng.choice((1, 30, 100)), linger_s=0.01)
    receivers, now = Receivers(rng), 0.0
    numbers: Counter[str] = Counter()
    due = deque(rng.choice("abc") for _ in range(300))
    answered: list[tuple[str, int]] = []
    calls: dict[int, dict[str, int] | None] = {}
    while due or delivery.unanswered:
        now += rng.choice((0.001, 0.02, 0.3))
        for _ in range(min(len(due), rng.randint(0, 4))):
            numbers[origin := due.popleft()] += 1
            delivery.offer(part(numbers[origin], rng.randint(1, 40), origin), now)
        while rng.random() < 0.8 and (chunk := delivery.next_chunk(now)) is not None:
            calls[chunk.ordinal] = receivers.call(chunk, rng.random() < 0.1)
        assert len(calls) <= delivery.window_chunks
        for ordinal in rng.sample(sorted(calls), rng.randint(0, len(calls))):  # answers come in any order
            answered += [(p.origin, p.number) for p in delivery.settle(ordinal, calls.pop(ordinal), now)]
    for origin, count in numbers.items():
        assert [number for name, number in receivers.committed if name == origin] == list(range(1, count + 1))
        assert [number for name, number in answered if name == origin] == list(range(1, count + 1))


def test_a_part_offered_again_that_was_answered_meanwhile_is_sent_under_its_own_number() -> None:
    """A call of a forwarder that is gone was answered for more than its successor has been offered."""
    delivery = offered(2)
    chunk = delivery.next_chunk(0.0)
    assert chunk is not None
    delivery.settle(chunk.ordinal, {"a": 9}, 0.0)
    delivery.offer(part(3), 0.0)
    chunk = delivery.next_chunk(0.0)
    assert chunk is not None
    assert chunk.firsts == {"a": 3}
    assert [p.number for p in delivery.settle(chunk.ordinal, {"a": 9}, 0.0)] == [3]


class Cluster:
    """Collectors whose forwarder may die: each publishes again to the next one what it was not credited, as its slots allow.

    Calls of a forwarder that died may still be carried out, at any later moment and in any order, and their answers reach nobody.
    """

    def __init__(self, rng: random.Random, origins: str) -> None:
        self.rng = rng
        self.receivers = Receivers(rng)
        self.published = dict.fromkeys(origins, 0)
        self.credited = dict.fromkeys(origins, 0)
        self.offered = dict.fromkeys(origins, 0)  # to the present forwarder
        self.orphans: list[Chunk[None]] = []
        self.deaths = 0
        self.delivery: Delivery[None] = Delivery()
        self.calls: dict[int, Chunk[None]] = {}
        self.start_forwarder()

    def start_forwarder(self) -> None:
        rng = self.rng
        self.delivery = Delivery(window_chunks=rng.randint(1, 4), chunk_bytes=rng.choice((1, 30, 100)), linger_s=0.01)
        self.calls, self.offered = {}, dict(self.credited)

    def kill_forwarder(self) -> None:
        self.deaths += 1
        self.orphans += [call for call in self.calls.values() if self.rng.random() < 0.7]
        self.start_forwarder()

    def step(self, now: float, slots: int, limit: int) -> None:
        rng = self.rng
        for origin in self.published:
            if rng.random() < 0.03:  # its session is lost, and its next one goes to the same forwarder, which still has the publishes
                self.offered[origin] = self.credited[origin]
            for _ in range(rng.randint(0, 3)):
                if self.offered[origin] < min(limit, self.credited[origin] + slots):
                    self.offered[origin] += 1
                    self.published[origin] = max(self.published[origin], self.offered[origin])
                    self.delivery.offer(part(self.offered[origin], rng.randint(1, 40), origin), now)
        while rng.random() < 0.8 and (chunk := self.delivery.next_chunk(now)) is not None:
            self.calls[chunk.ordinal] = chunk
        if self.orphans and rng.random() < 0.5:
            self.receivers.call(self.orphans.pop(rng.randrange(len(self.orphans))), dies=False)
        for ordinal in rng.sample(sorted(self.calls), rng.randint(0, len(self.calls))):  # in any order
            through = self.receivers.call(self.calls.pop(ordinal), rng.random() < 0.1)
            for done in self.delivery.settle(ordinal, through, now):
                if rng.random() < 0.9:  # else the forwarder dies before its word is heard
                    self.credited[done.origin] = max(self.credited[done.origin], done.number)
                else:
                    self.kill_forwarder()
                    return
        if rng.random() < 0.03:
            self.kill_forwarder()


@pytest.mark.parametrize("seed", range(40))
def test_every_publish_is_committed_once_and_in_order_though_forwarders_die_and_their_calls_come_late(seed: int) -> None:
    rng = random.Random(seed)
    cluster, now, limit, slots = Cluster(rng, "abc"), 0.0, 80, rng.randint(1, 12)
    while min(cluster.credited.values()) < limit or cluster.orphans:
        now += rng.choice((0.001, 0.02, 0.3))
        cluster.step(now, slots, limit)
    for origin in cluster.published:
        assert [number for name, number in cluster.receivers.committed if name == origin] == list(range(1, limit + 1))
    assert cluster.deaths > 0
