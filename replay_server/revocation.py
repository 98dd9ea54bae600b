"""Leases whose deadline has passed: ended, refunded and told."""

from __future__ import annotations

import logging
import time

from replay_server.leases import Lease
from replay_server.replay import Replay
from replay_server.stall_log import Repeats

log = logging.getLogger("replay_server")

_FLOODED_NS = 10**9
_TELL_REVOKED_NS = 60 * 10**9


class Revocation:
    """Of all learners' leases."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._repeats = Repeats(_TELL_REVOKED_NS)

    def end_overdue(self, now_ns: int, *, is_read_empty: bool) -> int:
        """Ends leases whose deadline has passed, after the socket was read empty: a release that has come counts. Returns how many.

        A flood, under which it never is, puts that off no longer than _FLOODED_NS: a lease would hold its rows for ever.
        """
        deadline_ns = self._replay.leases.next_deadline_ns
        if deadline_ns is None or deadline_ns >= now_ns or not (is_read_empty or now_ns - deadline_ns > _FLOODED_NS):
            return 0
        expired = self._replay.leases.expire(now_ns)
        for lease in expired:
            self._replay.flow.refund(lease.counted_rows)
            self._replay.counters.leases_revoked += lease.rows > 0  # one without rows was a look, which no count knows of
            self._tell(lease, now_ns)
        return len(expired)

    def _tell(self, lease: Lease, now_ns: int) -> None:
        """At once the first time, then once a minute for each learner: one whose gathers are slow loses two a second.

        Nothing where it said bye since: what was granted just then it had no use for.
        """
        learner = self._replay.sessions.find(lease.session)
        times = self._repeats.note(lease.session, now_ns) if learner is not None else None
        if learner is None or times is None:
            return
        log.warning(
            "revoked lease %d of %s, and %d before it that were not told: it held seq %d to %d for %.0f ms (--lease) and was heard last "
            "%.1f s ago; its gather is too slow for its lease, or it is stopped",
            lease.lease,
            learner,
            times - 1,
            lease.tail,
            lease.committed,
            (now_ns - lease.opened_ns) / 1e6,
            time.monotonic() - learner.heard_s,
        )
