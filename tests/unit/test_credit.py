"""Credits against a model: a set of numbers taken, and who holds which slot."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replay_server_protocol.errors import ProtocolViolation

from replay_server.credit import Credits, Verdict

DEPTH = 3


class CreditsAgainstSets(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.credits = Credits(DEPTH)
        self.taken: list[tuple[int, int]] = []  # (number, slot) in the server's hands
        self.submitted = 0
        self.newest = self.credited = 0

    @rule(number=st.integers(1, 30), slot=st.integers(-1, DEPTH))
    def publish(self, number: int, slot: int) -> None:
        verdict = self.credits.judge(number)
        if number <= self.newest:
            assert verdict is Verdict.REPEAT
        elif number > self.newest + 1:
            assert verdict is Verdict.GAP
        else:
            assert verdict is Verdict.NEW
            self.take(number, slot)

    def take(self, number: int, slot: int) -> None:
        if not 0 <= slot < DEPTH or slot in {held for _, held in self.taken}:
            with pytest.raises(ProtocolViolation, match=f"publish {number}: slot {slot}"):
                self.credits.take(number, slot)
            return
        self.credits.take(number, slot)
        self.newest = number
        self.taken.append((number, slot))

    @rule(slot=st.integers(0, DEPTH - 1))
    def publish_next(self, slot: int) -> None:
        self.take(self.newest + 1, slot)

    @precondition(lambda self: self.submitted < len(self.taken))
    @rule()
    def submit(self) -> None:
        self.credits.submit(self.taken[self.submitted][1])
        self.submitted += 1

    @precondition(lambda self: self.submitted)
    @rule()
    def commit(self) -> None:
        self.credited, slot = self.taken.pop(0)
        self.credits.credit(self.credited, slot)
        self.submitted -= 1

    @invariant()
    def sums_agree(self) -> None:
        assert self.credits.outstanding + len(self.taken) == DEPTH
        assert (self.credits.taken, self.credits.credited) == (self.newest, self.credited)


TestCreditsAgainstSets = CreditsAgainstSets.TestCase


def test_publish_without_credit_raises_and_changes_nothing() -> None:
    credits = Credits(2)
    credits.take(1, 0)
    with pytest.raises(ProtocolViolation, match="its credit was not returned"):
        credits.take(2, 0)
    assert (credits.taken, credits.outstanding) == (1, 1)
    credits.take(2, 1)
    assert credits.outstanding == 0


def test_the_same_number_twice_is_a_repeat_and_a_lost_one_a_gap() -> None:
    credits = Credits(2)
    assert credits.judge(2) is Verdict.GAP
    credits.take(1, 0)
    assert credits.judge(1) is Verdict.REPEAT
    assert credits.judge(2) is Verdict.NEW
    assert credits.judge(3) is Verdict.GAP


def test_a_slot_is_not_credited_before_it_was_published() -> None:
    credits = Credits(1)
    with pytest.raises(ProtocolViolation):
        credits.credit(1, 0)
    with pytest.raises(ProtocolViolation):
        credits.submit(0)
