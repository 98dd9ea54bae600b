"""Ring arithmetic against a model that writes every row down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replay_server_protocol.errors import ProtocolViolation

from replay_server.ring import Ring, Span


class RingAgainstRows(RuleBasedStateMachine):
    """The model: which seq lies in which ring row, which rows are committed, which windows are leased."""

    @initialize(capacity=st.integers(1, 12), headroom=st.integers(1, 6))
    def start(self, capacity: int, headroom: int) -> None:
        self.ring = Ring(capacity, headroom)
        self.rows: list[int | None] = [None] * (capacity + headroom)
        self.spans: list[Span] = []
        self.committed = 0
        self.leases: list[tuple[int, int]] = []

    def window(self) -> range:
        return range(max(0, self.committed - self.ring.capacity), self.committed)

    def is_needed(self, seq: int | None) -> bool:
        """In the window, not yet committed, or in a leased window."""
        return seq is not None and (seq >= self.window().start or any(tail <= seq < committed for tail, committed in self.leases))

    def oldest_lease(self) -> int | None:
        return min((tail for tail, _ in self.leases), default=None)

    @rule(rows=st.integers(0, 7))
    def reserve(self, rows: int) -> None:
        first = self.ring.reserved
        if rows > len(self.rows):
            return
        taken = [self.rows[seq % len(self.rows)] for seq in range(first, first + rows)]
        if any(self.is_needed(seq) for seq in taken):
            assert self.ring.missing_rows(rows, self.oldest_lease()) > 0
            with pytest.raises(ProtocolViolation):
                self.ring.reserve(rows, self.oldest_lease())
            assert self.ring.reserved == first
            return
        assert self.ring.missing_rows(rows, self.oldest_lease()) == 0
        span = self.ring.reserve(rows, self.oldest_lease())
        assert (span.first_seq, span.end_seq) == (first, first + rows)
        written = [index for start, count in self.ring.pieces(first, rows) for index in range(start, start + count)]
        assert written == [seq % len(self.rows) for seq in range(first, first + rows)]
        for seq, index in zip(range(first, first + rows), written, strict=True):
            self.rows[index] = seq
        self.spans.append(span)

    @precondition(lambda self: self.spans)
    @rule()
    def commit(self) -> None:
        span = self.spans.pop(0)
        self.ring.commit(span)
        self.committed = span.end_seq

    @precondition(lambda self: self.committed)
    @rule()
    def lease(self) -> None:
        self.leases.append((self.window().start, self.window().stop))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        self.leases.pop(which % len(self.leases))

    @invariant()
    def sums_agree(self) -> None:
        ring = self.ring
        assert range(ring.tail, ring.committed) == self.window()
        assert ring.size == len(self.window()) <= ring.capacity
        assert ring.in_flight == sum(span.rows for span in self.spans)
        assert ring.oldest_owned_seq == max(0, ring.reserved - ring.ring_rows)

    @invariant()
    def whatever_is_needed_is_there(self) -> None:
        for seq in [*self.window(), *(seq for lease in self.leases for seq in range(*lease))]:
            assert self.rows[seq % len(self.rows)] == seq


TestRingAgainstRows = RingAgainstRows.TestCase


def test_a_span_of_the_whole_headroom_always_fits_when_nothing_is_leased() -> None:
    ring = Ring(capacity=5, headroom=3)
    for _ in range(20):
        ring.commit(ring.reserve(3, None))
    assert (ring.committed, ring.tail, ring.size) == (60, 55, 5)


def test_missing_rows_says_how_far_a_lease_must_move() -> None:
    ring = Ring(capacity=4, headroom=2)
    for _ in range(3):
        ring.commit(ring.reserve(2, None))
    assert ring.missing_rows(2, 0) == 2
    assert ring.missing_rows(2, 1) == 1
    assert ring.missing_rows(2, 2) == 0
    assert ring.missing_rows(2, 6) == 0, "a lease younger than the tail holds nothing back"


def test_commit_out_of_order_raises_and_changes_nothing() -> None:
    ring = Ring(8, 4)
    first, second = ring.reserve(2, None), ring.reserve(2, None)
    for wrong in (second, Span(0, 5), Span(1, 1)):
        with pytest.raises(ProtocolViolation, match="not next"):
            ring.commit(wrong)
    assert ring.committed == 0
    ring.commit(first)
    with pytest.raises(ProtocolViolation):
        ring.commit(first)
    ring.commit(second)
    assert ring.committed == 4


@given(st.integers(1, 50), st.integers(0, 10**12), st.data())
def test_pieces_are_the_rows_in_order_and_at_most_two(ring_rows: int, first_seq: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, ring_rows))
    ring = Ring(ring_rows - 1, 1)
    pieces = ring.pieces(first_seq, rows)
    assert len(pieces) <= 2
    assert all(count > 0 for _, count in pieces)
    assert [i for start, n in pieces for i in range(start, start + n)] == [s % ring_rows for s in range(first_seq, first_seq + rows)]
