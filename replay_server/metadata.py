"""What publishes say of their rows: checked when they arrive, merged when the rows are committed. No row is looked at here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from replay_server_protocol.episodes import unpack_episodes
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import Publish
from replay_server_protocol.schema import Schema
from replay_server_protocol.versions import unpack_versions

from replay_server.counters import Tally
from replay_server.episodes import EpisodeTally
from replay_server.sessions import CollectorSession, NonfiniteRow
from replay_server.staleness import Staleness

log = logging.getLogger("replay_server")

_TELL_EVERY_NS = 10 * 10**9


@dataclass(frozen=True, slots=True)
class Notes:
    """Which metadata a schema gives rise to."""

    has_episodes: bool
    has_versions: bool

    @classmethod
    def of(cls, schema: Schema) -> Notes:
        roles = schema.roles
        reward = schema[roles["reward"]] if "reward" in roles else None
        ends = [schema[roles[role]] for role in ("terminated", "truncated") if role in roles]
        is_summed = reward is not None and reward.elements == 1 and reward.dtype != "bool"
        return cls(is_summed and any(field.elements == 1 for field in ends), "policy_version" in roles)


class Metadata:
    """Moments, episodes and staleness of one ring. ``newest_version`` gives a mailbox's, or that of the newest post for an unknown one."""

    def __init__(self, tallies: list[Tally], notes: Notes, newest_version: Callable[[str], int | None]) -> None:
        self.tallies = tallies
        self.notes = notes
        self.episodes = EpisodeTally()
        self.staleness = Staleness()
        self._newest_version = newest_version

    def check(self, message: Publish) -> None:
        """Raises ProtocolViolation for what can't be said of these rows."""
        if message.moments and len(message.moments) != len(self.tallies):
            raise ProtocolViolation(f"moments of {len(message.moments)} fields came, {len(self.tallies)} are kept")
        for tally, packed in zip(self.tallies, message.moments, strict=False):
            tally.check(packed)
        if message.episodes:
            if not self.notes.has_episodes:
                raise ProtocolViolation("episodes came, but the schema does not say how they end")
            ended = unpack_episodes(message.episodes).returns[0]
            if ended > message.rows:
                raise ProtocolViolation(f"{ended} episodes can't end in {message.rows} rows")
        if message.versions:
            if not self.notes.has_versions:
                raise ProtocolViolation("policy versions came, but no field has that role")
            if sum(rows for _, rows in unpack_versions(message.versions)) != message.rows:
                raise ProtocolViolation(f"policy versions are not those of {message.rows} rows")

    def merge(self, collector: CollectorSession, message: Publish) -> None:
        """Adds what a checked publish says; its rows are committed now."""
        for tally, packed in zip(self.tallies, message.moments, strict=False):
            tally.merge(packed)
        if message.episodes:
            ended = unpack_episodes(message.episodes)
            self.episodes.merge(ended)
            collector.episodes.merge(ended)
        if message.versions:
            self.staleness.note(self._newest_version(message.mailbox), unpack_versions(message.versions))


def note_nonfinite(collector: CollectorSession, message: Publish, now_ns: int) -> None:
    """Keeps what was last seen of a collector's rows that are not finite, and logs it, at most once in ten seconds a collector."""
    if not message.nonfinite_field:
        return
    seen = collector.nonfinite = NonfiniteRow(message.nonfinite_field, message.nonfinite_row)
    if now_ns < collector.tell_nonfinite_at_ns:
        return
    collector.tell_nonfinite_at_ns = now_ns + _TELL_EVERY_NS
    log.warning(
        "%s: field %r is NaN or infinite in row %d of its session; so far %d rows rejected, %d kept",
        collector,
        seen.field,
        seen.row,
        collector.rejected_rows,
        collector.nonfinite_rows,
    )
