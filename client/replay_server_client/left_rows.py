"""Rows that a collector leaves behind which nobody has said are committed, and how they are told."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from replay_server_protocol.errors import ReplayTimeout

log = logging.getLogger("replay_server_client")


@dataclass(frozen=True, slots=True)
class LeftRows:
    """``published`` rows have no credit for ``uncredited_for_s``; the server counts them as what becomes of them. ``unpublished`` ones it
    never hears of: they are lost. So are those ``gone`` with an earlier server that no call has told of."""

    published: int = 0
    unpublished: int = 0
    gone: int = 0
    uncredited_for_s: float = 0.0

    @property
    def lost(self) -> int:
        return self.unpublished + self.gone

    @property
    def rows(self) -> int:
        return self.published + self.lost

    def __str__(self) -> str:
        silent = f"without a credit for {self.uncredited_for_s:.1f} s"
        told = (
            (self.published, f"{self.published:,} published, {silent}: the server may commit them yet"),
            (self.unpublished, f"{self.unpublished:,} never published: lost"),
            (self.gone, f"{self.gone:,} lost with an earlier server"),
        )
        return f"rows not committed: {'; '.join(text for rows, text in told if rows)}"

    def late(self, who: str, why: ReplayTimeout) -> ReplayTimeout:
        """The error of a close that has waited in vain, which is ``why``."""
        text = f"{who} is closed with {self}; {why}; to wait longer, call flush(timeout=...) before close()"
        return ReplayTimeout(text, **why.details, rows_in_flight=self.published, rows_lost=self.lost)

    def tell(self, who: str, remedy: str) -> None:
        """In the log, where no error does."""
        log.warning("%s ends with %s; %s", who, self, remedy)
