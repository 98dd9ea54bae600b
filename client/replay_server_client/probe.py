"""Whether sampling may begin, asked as a request of one row whose lease is ended unused."""

from __future__ import annotations

from replay_server_protocol.errors import ReplayError
from replay_server_protocol.messages import Grant, Refused

from replay_server_client.connection import Connection, error_of
from replay_server_client.conversation import ASK_AGAIN_NS, AT_REST_S, IDLE_NAP_S
from replay_server_client.lease_requests import LeaseRequests


class Probe:
    """A Requester of its own: ``ask``, until it ``has_passed`` or ``stop``."""

    def __init__(self, connection: Connection, ordinal: int) -> None:
        self.ordinal = ordinal
        self.number = 0
        self._connection = connection
        self._leases = LeaseRequests(connection, ordinal)
        self._is_wanted = False
        self._is_granted = False
        self._asked_ns = 0
        self._error: ReplayError | None = None

    def ask(self) -> None:
        self.number += 1
        self._is_wanted, self._is_granted, self._error = True, False, None
        self._asked_ns = 0

    def has_passed(self) -> bool:
        """Whether the server has granted. Raises what it refused with."""
        if self._error is not None:
            raise self._error
        return self._is_granted

    def stop(self) -> None:
        if self._is_wanted and not self._is_granted and self._connection.is_attached:
            self._leases.cancel(self.number)
        self._is_wanted = False

    def advance(self, now_ns: int) -> bool:
        if not self._is_wanted or self._is_granted or self._error is not None or now_ns - self._asked_ns < ASK_AGAIN_NS:
            return False
        self._asked_ns = now_ns
        self._leases.ask(self.number, rows=1)
        return True

    def granted(self, grant: Grant) -> None:
        self._is_granted = True
        self._leases.release(grant, is_used=False)

    def refused(self, refused: Refused) -> None:
        self._error = error_of(refused)

    def claim(self) -> None:
        return None

    def forget(self) -> None:
        self._asked_ns = 0
        self._is_granted = False

    def nap_s(self) -> float:
        return IDLE_NAP_S if self._is_wanted else AT_REST_S
