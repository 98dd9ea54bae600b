"""Credits of one collector: which publishes were taken, and which slots are whose.

Publishes are numbered, so a repeat is told from a new one and a lost one leaves a gap: nothing is taken twice, nothing is skipped.
"""

from __future__ import annotations

from enum import Enum

from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.states import SLOT, SlotEvent, SlotState, move


class Verdict(Enum):
    NEW = "new"  # take it
    REPEAT = "repeat"  # taken before: answer with the credit if it was given
    GAP = "gap"  # an earlier one was lost: the collector will repeat both, in order


class Credits:
    """``depth`` slots and the numbers of the publishes that filled them."""

    def __init__(self, depth: int) -> None:
        self.slots = [SlotState.FREE] * depth
        self.taken = 0
        self.credited = 0

    @property
    def outstanding(self) -> int:
        """Credits the collector holds."""
        return sum(state is SlotState.FREE for state in self.slots)

    def judge(self, number: int) -> Verdict:
        if number <= self.taken:
            return Verdict.REPEAT
        return Verdict.NEW if number == self.taken + 1 else Verdict.GAP

    def take(self, number: int, slot: int) -> None:
        """A new publish hands ``slot`` over. Raises ProtocolViolation, and changes nothing, when the collector has no credit for it."""
        if not 0 <= slot < len(self.slots):
            raise ProtocolViolation(f"publish {number}: slot {slot} is not one of {len(self.slots)}")
        if self.slots[slot] is not SlotState.FREE:
            raise ProtocolViolation(f"publish {number}: slot {slot} is {self.slots[slot].value}, its credit was not returned")
        self.slots[slot] = SlotState.PUBLISHED
        self.taken = number

    def submit(self, slot: int) -> None:
        self.slots[slot] = move(SLOT, self.slots[slot], SlotEvent.SUBMIT)

    def credit(self, number: int, slot: int) -> None:
        """The publish is committed: its slot is the collector's again."""
        self.slots[slot] = move(SLOT, self.slots[slot], SlotEvent.CREDIT)
        self.credited = number
