"""Which publishes of which origin were taken: how a publish that came by way of another machine is taken exactly once.

An origin is one collector elsewhere, over all its sessions; it numbers its publishes from 1. It, or whoever passes them on, may send one
again, after a loss or an error that says nothing about what became of it, and says with each which one is the ``first`` that has no answer
yet: all before it are committed. So a table that has forgotten an origin, or never knew it, starts right, and may be bounded: only an
origin with publishes on their way must not be forgotten, and those were heard of last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum

from replay_server_protocol.errors import ProtocolViolation, shown

MOST_ORIGINS = 4096


class Turn(Enum):
    NEXT = "next"  # take it
    REPEAT = "repeat"  # taken before: answer, take nothing
    EARLY = "early"  # one before it is missing: refuse it, it will come again after that one


class Origins:
    """The number of the last publish taken of each origin."""

    def __init__(self, most: int = MOST_ORIGINS) -> None:
        self._most = most
        self._taken: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._taken)

    def last(self, origin: str, first: int) -> int:
        """Every number up to this one was taken, here or before this table knew the origin."""
        return max(self._taken.get(origin, 0), first - 1)

    def judge(self, origin: str, number: int, first: int) -> Turn:
        """Changes nothing. Raises ProtocolViolation for a number that was answered long ago, by its own word."""
        if not 1 <= first <= number:
            raise ProtocolViolation(f"publish {number} of origin {origin!r}: the first without an answer can't be {first}")
        last = self.last(origin, first)
        if number <= last:
            return Turn.REPEAT
        return Turn.NEXT if number == last + 1 else Turn.EARLY

    def take(self, origin: str, number: int) -> None:
        """``number`` is taken, and all before it; a smaller one than was taken last changes nothing."""
        self._taken[origin] = max(number, self._taken.get(origin, 0))
        self._taken.move_to_end(origin)
        if len(self._taken) > self._most:
            self._taken.popitem(last=False)

    def forget(self, origin: str) -> None:
        self._taken.pop(origin, None)

    @property
    def parts(self) -> dict[str, object]:
        """Plain numbers from which ``restore`` makes it again, who was heard of longest ago first."""
        return dict(self._taken)

    def restore(self, parts: Mapping[str, object]) -> None:
        """Takes what ``parts`` of another table say. Raises ValueError for anything else."""
        for origin, number in parts.items():
            if not isinstance(origin, str) or type(number) is not int or number < 1:
                raise ValueError(f"{shown(origin)}: {shown(number)} is no number of an origin")
            self.take(origin, number)
