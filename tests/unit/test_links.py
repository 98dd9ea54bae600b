"""Chains against dicts: whatever collectors, lanes, masks, cuts, wraps and delays do, a walk inside a window finds the naive chain."""

from __future__ import annotations

import random

import numpy as np
import pytest
from replay_server_protocol.errors import ProtocolViolation
from support.held_ring import Bench, publish

from replay_server.links import NO_LINK, complete, link_span
from replay_server.sessions import CollectorSession


class Chains:
    """The model: every lane's rows in order, and where its chain was cut."""

    def __init__(self) -> None:
        self.next_of: dict[int, int] = {}
        self._last: dict[int, tuple[dict[int, int], int]] = {}  # collector -> (lane -> its row in the last span, that span)

    def add(self, collector: int, first_seq: int, lanes: list[tuple[int, bool]]) -> None:
        """A span: for each row its lane and whether a link may lead into it. A lane that misses a whole span is cut."""
        last, _ = self._last.get(collector, ({}, 0))
        now: dict[int, int] = {}
        for seq, (lane, is_cut) in enumerate(lanes, first_seq):
            before = now.get(lane, last.get(lane))
            if before is not None and not is_cut:
                self.next_of[before] = seq
            now[lane] = seq
        self._last[collector] = (now, first_seq)

    def forget(self, collector: int) -> None:
        self._last.pop(collector, None)


def walk(bench: Bench, seq: int, tail: int, committed: int) -> list[int]:
    """The chain from ``seq`` by DESIGN's rule: links outside the ring and seqs past the window are none, before they are used."""
    ring_rows, chain = bench.ring.ring_rows, [seq]
    while True:
        link = bench.link(seq)
        if not 0 <= link < ring_rows:
            return chain
        seq += (link - seq % ring_rows) % ring_rows
        if seq >= committed or seq == chain[-1]:
            return chain
        assert tail <= seq
        chain.append(seq)


def naive(chains: Chains, seq: int, committed: int) -> list[int]:
    chain = [seq]
    while (following := chains.next_of.get(chain[-1])) is not None and following < committed:
        chain.append(following)
    return chain


def code(lanes: list[tuple[int, bool]]) -> bytes:
    return np.array([~lane if is_cut else lane for lane, is_cut in lanes], "<i4").tobytes()


def random_span(rng: random.Random, lanes: int, slot_rows: int) -> tuple[bytes, list[tuple[int, bool]]]:
    """Whole plain steps, or masked ones with cuts."""
    steps = rng.randint(1, slot_rows // lanes)
    if rng.random() < 0.4:
        return b"", [(lane, False) for _ in range(steps) for lane in range(lanes)]
    rows = [(lane, rng.random() < 0.15) for _ in range(steps) for lane in range(lanes) if rng.random() < 0.7]
    rows = rows or [(rng.randrange(lanes), False)]
    return code(rows), rows


@pytest.mark.parametrize("seed", range(25))
def test_walks_inside_every_window_find_exactly_the_naive_chain(seed: int) -> None:
    rng = random.Random(seed)
    capacity, slot_rows = rng.randint(4, 40), rng.randint(4, 10)
    bench = Bench(capacity, rng.randint(slot_rows, 20), has_link=True)
    chains = Chains()
    collectors = [(bench.collector(slot_rows, 3, lanes=(lanes := rng.randint(1, 4))), lanes) for _ in range(rng.randint(1, 3))]
    numbers = dict.fromkeys((c.token for c, _ in collectors), 0)
    queue: list[tuple[CollectorSession, list[tuple[int, bool]]]] = []
    reserved = 0
    for _ in range(150):
        collector, lanes = rng.choice(collectors)
        free = [slot for slot, state in enumerate(collector.credits.slots) if state.value == "free"]
        if free and rng.random() < 0.6:
            packed, rows = random_span(rng, lanes, slot_rows)
            numbers[collector.token] += 1
            bench.ingress.accept(collector, publish(numbers[collector.token], free[0], len(rows), lanes=packed), 0)
            queue.append((collector, rows))
        for _ in range(bench.ingress.drain(0)):
            owner, rows = queue.pop(0)
            chains.add(owner.token, reserved, rows)
            reserved += len(rows)
        bench.memory.complete(rng.randint(0, 2))
        bench.ingress.commit(0)
        window = range(bench.ring.tail, bench.ring.committed)
        for seq in window:
            assert walk(bench, seq, window.start, window.stop) == naive(chains, seq, window.stop)
    assert reserved > 2 * bench.ring.ring_rows, "the ring must have wrapped"


def test_a_slow_lanes_link_is_not_written_into_another_collectors_row() -> None:
    bench = Bench(4, 2, has_link=True)
    slow, fast = bench.collector(2), bench.collector(2)

    def commit(collector: CollectorSession, number: int) -> None:
        bench.ingress.accept(collector, publish(number, (number - 1) % 2, 2), 0)
        bench.ingress.drain(0)
        bench.memory.complete(1)
        bench.ingress.commit(0)

    commit(slow, 1)
    for number in range(1, 4):
        commit(fast, number)
    commit(slow, 2)
    assert [walk(bench, seq, 6, 10) for seq in (6, 7, 8, 9)] == [[6, 7], [7], [8, 9], [9]]


def test_links_lie_in_the_ring_before_the_spans_event_is_seen() -> None:
    bench = Bench(8, 4, has_link=True)
    collector = bench.collector(2)
    bench.ingress.accept(collector, publish(1, 0, 2), 0)
    bench.ingress.accept(collector, publish(2, 1, 2), 0)
    bench.ingress.drain(0)
    bench.memory.complete(2)
    assert bench.link(1) == 2
    assert bench.ring.committed == 0
    bench.ingress.commit(0)
    assert walk(bench, 0, 0, 4) == [0, 1, 2, 3]
    assert walk(bench, 0, 0, 2) == [0, 1], "a window granted before the second commit ends the walk at its own end"


def test_a_rejected_publish_cuts_every_lane_of_its_collector() -> None:
    bench = Bench(16, 4, has_link=True)
    collector = bench.collector(2)
    for number, lanes in ((1, b""), (2, b"no"), (3, b"")):
        try:
            bench.ingress.accept(collector, publish(number, (number - 1) % 2, 2, lanes=lanes), 0)
        except ProtocolViolation:
            assert number == 2
        bench.ingress.drain(0)
        bench.memory.complete(1)
        bench.ingress.commit(0)
    assert walk(bench, 0, 0, 4) == [0, 1]


def test_plain_steps_link_each_lane_to_its_next_step() -> None:
    linked, first = link_span(first_seq=10, rows=6, lanes=2, lanes_of_rows=b"", ring_rows=13)
    assert linked.links.tolist() == [12, 0, 1, 2, NO_LINK, NO_LINK]
    assert linked.last_offset.tolist() == [4, 5]
    assert first.tolist() == [0, 1]


def test_a_cut_row_has_no_predecessor_inside_or_before_its_span() -> None:
    lanes = [(0, False), (1, True), (0, True), (1, False)]
    linked, first = link_span(0, 4, 2, code(lanes), 100)
    assert linked.links.tolist() == [NO_LINK, 3, NO_LINK, NO_LINK]
    assert first.tolist() == [0, NO_LINK]


@pytest.mark.parametrize(
    ("rows", "lanes", "packed"),
    [
        (3, 2, b""),
        (2, 2, b"\0" * 7),
        (2, 2, b"\0" * 12),
        (1, 2, np.array([2], "<i4").tobytes()),
        (1, 2, np.array([~2], "<i4").tobytes()),
    ],
)
def test_lanes_that_do_not_fit_are_refused(rows: int, lanes: int, packed: bytes) -> None:
    with pytest.raises(ValueError, match="rows"):
        link_span(0, rows, lanes, packed, 100)


def test_completion_leaves_out_rows_that_belong_to_another_span_by_now() -> None:
    previous, _ = link_span(0, 4, 4, b"", 8)
    span, first = link_span(20, 4, 4, b"", 8)
    run = complete(previous, span, first, 8, oldest_owned_seq=2)
    assert run is not None
    assert (run.first_seq, run.links.tolist()) == (2, [6, 7])
    assert complete(previous, span, first, 8, oldest_owned_seq=4) is None
