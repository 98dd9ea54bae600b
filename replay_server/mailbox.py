"""Mailboxes: small versioned sets of named arrays from a learner to collectors. Whole versions only, the newest wins.

A version lies in a segment of its own, written once by its poster and lent to readers by messages. An older version's segment goes when
the last reader has given it back; one lent to a session that ended is never written again, so a slow reader can't see two versions mixed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from replay_server_protocol.errors import BudgetExceeded, InvalidRequest, ProtocolViolation
from replay_server_protocol.messages import MailPost
from replay_server_protocol.segment import Segment, segment_name

_MOST_MAILBOXES = 64
_MOST_LOANS = 64


@dataclass(slots=True, eq=False)
class Version:
    """One posted set of arrays; ``version`` is 0 until it is whole."""

    mailbox: str
    segment: Segment
    manifest: dict[str, object]
    version: int = 0
    readers: list[int] = field(default_factory=list)


class Mailboxes:
    """Every mailbox of this server; all their segments together take at most ``budget_bytes``."""

    def __init__(self, run_id: str, budget_bytes: int) -> None:
        self._run_id = run_id
        self._budget_bytes = budget_bytes
        self._newest: dict[str, Version] = {}
        self._newest_post: Version | None = None
        self._retired: list[Version] = []
        self._posting: dict[tuple[int, int], Version] = {}
        self._subscribers: dict[str, set[int]] = {}
        self._segments = 0

    @property
    def host_bytes(self) -> int:
        return sum(version.segment.n_bytes for version in (*self._newest.values(), *self._retired, *self._posting.values()))

    @property
    def versions(self) -> dict[str, int]:
        return {name: version.version for name, version in self._newest.items()}

    def newest_version(self, mailbox: str) -> int | None:
        """Of this mailbox, or of the newest post if there is no such mailbox; None before the first post."""
        newest = self._newest.get(mailbox) or self._newest_post
        return None if newest is None else newest.version

    def post(self, session: int, message: MailPost) -> Segment:
        """Makes the segment of a new version, in the place of an unfinished one. Raises BudgetExceeded or InvalidRequest."""
        self._drop_posts(session)
        names = {*self._newest, *(version.mailbox for version in self._posting.values())}
        if message.name not in names and len(names) >= _MOST_MAILBOXES:
            raise InvalidRequest(f"mailbox {message.name!r}: there are {_MOST_MAILBOXES} mailboxes already, which is the limit")
        if message.n_bytes < 1 or self.host_bytes + message.n_bytes > self._budget_bytes:
            raise BudgetExceeded(
                f"mailbox {message.name!r}: {message.n_bytes:,} bytes don't fit, {self.host_bytes:,} of --mailbox-bytes "
                f"{self._budget_bytes:,} are in use (a version that readers still hold counts)",
                needed_bytes=message.n_bytes,
                free_bytes=max(0, self._budget_bytes - self.host_bytes),
            )
        self._segments += 1
        segment = Segment.create(segment_name(self._run_id, f"mail{self._segments}"), message.n_bytes)
        segment.close()  # the server never looks inside
        self._posting[session, message.number] = Version(message.name, segment, message.manifest)
        return segment

    def finish(self, session: int, number: int) -> Version:
        """The arrays are written: this is now the newest version. Raises ProtocolViolation for a post that isn't open."""
        version = self._posting.pop((session, number), None)
        if version is None:
            raise ProtocolViolation(f"post {number} isn't open")
        before = self._newest.get(version.mailbox)
        version.version = before.version + 1 if before else 1
        self._newest[version.mailbox] = self._newest_post = version
        if before is not None:
            self._retired.append(before)
            self._tidy()
        return version

    def subscribers(self, mailbox: str) -> set[int]:
        return self._subscribers.get(mailbox, set())

    def lend(self, session: int, mailbox: str, newer_than: int) -> Version | None:
        """The newest version if there is one after ``newer_than``; the session reads it until ``give_back``.

        Raises InvalidRequest when the session asks for more names than there can be mailboxes, or never gives anything back.
        """
        asked = sum(session in subscribers for subscribers in self._subscribers.values())
        if session not in self.subscribers(mailbox) and asked >= _MOST_MAILBOXES:
            raise InvalidRequest(f"mailbox {mailbox!r}: this client asks for {asked} mailboxes already, which is the limit")
        self._subscribers.setdefault(mailbox, set()).add(session)
        newest = self._newest.get(mailbox)
        if newest is None or newest.version <= newer_than:
            return None
        if newest.readers.count(session) >= _MOST_LOANS:
            raise InvalidRequest(f"mailbox {mailbox!r}: this client holds version {newest.version} {_MOST_LOANS} times; give it back first")
        newest.readers.append(session)
        return newest

    def give_back(self, session: int, mailbox: str, version: int) -> None:
        for held in (*self._newest.values(), *self._retired):
            if held.mailbox == mailbox and held.version == version and session in held.readers:
                held.readers.remove(session)
                break
        self._tidy()

    def forget(self, session: int) -> None:
        """A session ended: its posts, loans and subscriptions end too."""
        self._drop_posts(session)
        for held in (*self._newest.values(), *self._retired):
            held.readers = [reader for reader in held.readers if reader != session]
        for name, subscribers in list(self._subscribers.items()):
            subscribers.discard(session)
            if not subscribers:
                del self._subscribers[name]
        self._tidy()

    def close(self) -> None:
        for version in (*self._newest.values(), *self._retired, *self._posting.values()):
            version.segment.unlink()

    def _drop_posts(self, session: int) -> None:
        for key in [key for key in self._posting if key[0] == session]:
            self._posting.pop(key).segment.unlink()

    def _tidy(self) -> None:
        for version in [version for version in self._retired if not version.readers]:
            version.segment.unlink()
            self._retired.remove(version)
