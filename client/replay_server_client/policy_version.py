"""Which version of the policy makes the rows that are written now."""

from __future__ import annotations

from replay_server_protocol.errors import InvalidRequest, shown

MOST_VERSIONS = 2**63 - 1


class PolicyVersion:
    """``version`` is what rows without one are stamped with: 0 before the first, that of the mailbox taken last, or one that was given.

    ``mailbox`` says whose versions they are, empty for one that was given.
    """

    def __init__(self) -> None:
        self.version = 0
        self.mailbox = ""

    def took(self, mailbox: str, version: int) -> None:
        """A mailbox's version was handed out: the rows that follow are made with it."""
        self.version, self.mailbox = version, mailbox

    def give(self, version: object) -> None:
        """Raises InvalidRequest for what is no version."""
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MOST_VERSIONS:
            raise InvalidRequest(f"policy_version = {shown(version)}: an integer from 0 to 2**63 - 1")
        self.version, self.mailbox = version, ""

    def forget(self) -> None:
        """The mailbox's server is gone: its successor counts versions from 1 again."""
        if self.mailbox:
            self.version = 0
