"""What publishes say of their rows: checked when they arrive, merged when the rows are committed. No row is looked at here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from replay_server_protocol.episodes import EndedEpisodes, unpack_episodes
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import Publish
from replay_server_protocol.moments import Scalars
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


class Said(NamedTuple):
    """What one publish says of its rows, checked: moments field by field, as their tally reads them, (version, rows) pairs and the
    mailbox of the versions."""

    moments: tuple[bytes | Scalars, ...] = ()
    episodes: EndedEpisodes | None = None
    versions: tuple[tuple[int, int], ...] = ()
    mailbox: str = ""


NOTHING = Said()


class Metadata:
    """Moments, episodes and staleness of one ring. ``newest_version`` gives a mailbox's, or that of the newest post for an unknown one."""

    def __init__(self, tallies: list[Tally], notes: Notes, newest_version: Callable[[str], int | None]) -> None:
        self.tallies = tallies
        self.notes = notes
        self.episodes = EpisodeTally()
        self.staleness = Staleness()
        self._newest_version = newest_version

    def read(self, message: Publish) -> Said:
        """Raises ProtocolViolation for what can't be said of these rows."""
        if message.moments and len(message.moments) != len(self.tallies):
            raise ProtocolViolation(f"moments of {len(message.moments)} fields came, {len(self.tallies)} are kept")
        moments = tuple(tally.read(packed) for tally, packed in zip(self.tallies, message.moments, strict=False))
        episodes, versions = None, tuple[tuple[int, int], ...]()
        if message.episodes:
            if not self.notes.has_episodes:
                raise ProtocolViolation("episodes came, but the schema does not say how they end")
            episodes = unpack_episodes(message.episodes)
            ended = episodes.returns[0]
            if ended > message.rows:
                raise ProtocolViolation(f"{ended} episodes can't end in {message.rows} rows")
        if message.versions:
            if not self.notes.has_versions:
                raise ProtocolViolation("policy versions came, but no field has that role")
            versions = tuple(unpack_versions(message.versions))
            if sum(rows for _, rows in versions) != message.rows:
                raise ProtocolViolation(f"policy versions are not those of {message.rows} rows")
        return Said(moments, episodes, versions, message.mailbox)

    def merge(self, collector: CollectorSession, said: Said) -> None:
        """Adds what a publish said; its rows are committed now."""
        for tally, part in zip(self.tallies, said.moments, strict=False):
            tally.merge(part)
        if said.episodes is not None:
            self.episodes.merge(said.episodes)
            collector.episodes.merge(said.episodes)
        if said.versions:
            self.staleness.note(self._newest_version(said.mailbox), said.versions)


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
