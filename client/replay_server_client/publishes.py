"""The publishes of one session: what was published under which number, what has no credit yet, what is to be published again.

```
numbers of the origin   1 … before             before + 1 … credited        … before + number
                        earlier sessions'  │   this session's, credited │   unanswered │   kept of earlier ones, then new ones
```

Integers and messages alone: no socket, no memory, no clock. A step changes nothing: it returns the ``Publishes`` after it, which its
caller takes over, with what else the step changes, in plain assignments.
"""

from __future__ import annotations

from typing import NamedTuple

from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import Credit, Publish, SegmentLent

from replay_server_client.remains import KeptPublish, Remains
from replay_server_client.slot_writer import Filled

REPEAT_S = 1.0
"""A publish is repeated after so long without a credit: libzmq drops what is queued when a connection breaks."""


class Publishes(NamedTuple):
    """``number`` is the newest publish's of this session, ``committed`` the newest credit's seq.

    ``origin`` is "" where no session can go on from this one; else the session's publish 1 is ``before`` + 1 of it. ``unanswered`` and
    ``kept`` are in order. ``placed`` rows came before the next publish, rejected ones among them. A credit has been missing since
    ``quiet_since_s``, whatever was repeated.
    """

    session: int
    generation: int
    quiet_since_s: float
    origin: str = ""
    before: int = 0
    number: int = 0
    unanswered: tuple[Publish, ...] = ()
    kept: tuple[KeptPublish, ...] = ()
    committed: int = 0
    placed: int = 0
    repeated_s: float = 0.0

    @classmethod
    def of(cls, lent: SegmentLent, remains: Remains | None, now_s: float) -> Publishes:
        """Those of the session that ``lent`` begins, which goes on from ``remains``; None where it can't be resumed."""
        fresh = cls(lent.session, lent.generation, now_s)
        if remains is None:
            return fresh
        return fresh._replace(
            origin=remains.origin, before=remains.credited, kept=remains.kept, committed=remains.committed, placed=remains.placed
        )

    @property
    def unanswered_rows(self) -> int:
        """Rows of this session's publishes without a credit."""
        return sum(publish.rows for publish in self.unanswered)

    @property
    def kept_rows(self) -> int:
        """Rows of earlier sessions' that this one has not published again."""
        return sum(kept.publish.rows for kept in self.kept)

    @property
    def credited(self) -> int:
        """The number in the origin up to which all are credited: its newest ones are unanswered."""
        return self.before + self.number - len(self.unanswered)

    @property
    def newest(self) -> Publish:
        """The last one that was published and has no credit."""
        return self.unanswered[-1]

    def is_to_repeat(self, now_s: float) -> bool:
        """Whether there are unanswered publishes, and a second has passed in silence."""
        return bool(self.unanswered) and now_s - max(self.quiet_since_s, self.repeated_s) >= REPEAT_S

    def with_repeat(self, now_s: float) -> Publishes:
        """After all unanswered ones were sent again."""
        return self._replace(repeated_s=now_s)

    def with_publish(self, slot: int, filled: Filled, masked: int, mailbox: str, now_s: float) -> Publishes:
        """After what is ``filled`` of ``slot`` is published. ``masked`` rows were left out since the publish before; ``mailbox`` is where
        the rows' versions came from."""
        number = self.number + 1
        field, row = filled.offender or ("", -self.placed)
        publish = Publish(
            self.session,
            self.generation,
            number,
            slot,
            filled.rows,
            masked,
            filled.rejected,
            filled.nonfinite,
            filled.lanes,
            filled.moments,
            filled.episodes,
            filled.versions,
            mailbox if filled.versions else "",
            field,
            self.placed + row,
            *self._origin_of(number),
        )
        return self._replace(
            number=number,
            unanswered=(*self.unanswered, publish),
            placed=self.placed + filled.rows + filled.rejected,
            quiet_since_s=self.quiet_since_s if self.unanswered else now_s,
        )

    def with_kept(self, slot: int, now_s: float) -> Publishes:
        """After the first of the kept is published again, from ``slot``: in the words of its own session, under a number of this one."""
        number, (first, *rest) = self.number + 1, self.kept
        origin, origin_number, origin_first = self._origin_of(number)
        publish = first.publish._replace(
            session=self.session,
            generation=self.generation,
            number=number,
            slot=slot,
            origin=origin,
            origin_number=origin_number,
            origin_first=origin_first,
        )
        return self._replace(
            number=number,
            unanswered=(*self.unanswered, publish),
            kept=tuple(rest),
            quiet_since_s=self.quiet_since_s if self.unanswered else now_s,
        )

    def with_credit(self, credit: Credit, now_s: float) -> Publishes:
        """After a credit, which answers every publish up to its number. An old number again answers none.

        Raises ProtocolViolation for the number of a publish that was not made.
        """
        if credit.number > self.number:
            raise ProtocolViolation(f"credit for publish {credit.number}, but only {self.number} were published")
        answered = max(self.before + credit.number - self.credited, 0)
        return self._replace(
            unanswered=self.unanswered[answered:],
            committed=max(self.committed, credit.committed),
            quiet_since_s=now_s,
        )

    def answered_since(self, before: Publishes) -> tuple[Publish, ...]:
        """Those that had no credit in ``before``, and have one here."""
        return before.unanswered[: len(before.unanswered) - len(self.unanswered)]

    def _origin_of(self, number: int) -> tuple[str, int, int]:
        """The last fields of this session's publish ``number``: origin, number there, the first there without a credit."""
        return (self.origin, self.before + number, self.credited + 1) if self.origin else ("", 0, 0)
