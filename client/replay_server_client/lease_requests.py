"""What a requester says to its server about leases: asked for, no longer wanted, over, and of no use after all."""

from __future__ import annotations

from replay_server_protocol.messages import Cancel, Grant, Observe, Release, Sample, Unused

from replay_server_client.connection import Connection


class LeaseRequests:
    """Those of one requester of a session, told from others by its ``ordinal``. Each call sends one message at most; none waits."""

    def __init__(self, connection: Connection, ordinal: int) -> None:
        self.ordinal = ordinal
        self._connection = connection

    def ask(self, number: int, rows: int, min_committed: int = 0, max_age_rows: int | None = None) -> None:
        """For a lease to draw ``rows`` rows. The same ``number`` again replaces the waiting request."""
        connection = self._connection
        connection.send(Sample(connection.session, connection.generation, self.ordinal, number, rows, min_committed, max_age_rows))

    def observe(self, number: int) -> None:
        """For a lease to look at rows of the whole window, which counts nowhere."""
        connection = self._connection
        connection.send(Observe(connection.session, connection.generation, self.ordinal, number))

    def cancel(self, number: int) -> None:
        """A waiting request is no longer wanted."""
        connection = self._connection
        connection.send(Cancel(connection.session, connection.generation, self.ordinal, number))

    def release(self, grant: Grant, *, is_used: bool) -> None:
        """Ends the lease; its rows count as sampled if ``is_used``."""
        self._connection.send(Release(grant.session, grant.generation, grant.lease, is_used))

    def refund(self, grant: Grant, rows: int) -> None:
        """Nobody had the ``rows`` rows of a lease that was released as used. Another session's rows are not this one's to refund."""
        connection = self._connection
        if connection.is_attached and grant.session == connection.session:
            connection.send(Unused(grant.session, grant.generation, rows))
