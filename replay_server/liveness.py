"""Deaths of processes, seen by pidfd: certain, immediate, and never taken from a process that merely is slow or stopped."""

from __future__ import annotations

import os
import select

from replay_server_protocol.process import ProcessIdentity


class DeathWatch:
    """Watches processes by token; its ``fileno`` turns readable when one of them dies."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._pidfds: dict[int, int] = {}
        self._tokens: dict[int, int] = {}

    def fileno(self) -> int:
        return self._poll.fileno()

    def watch(self, token: int, process: ProcessIdentity) -> bool:
        """Watches ``process`` under ``token``. False where it can't be: no pid, another PID namespace, or a pid that is somebody else's.

        The start time is compared after the pidfd is open, so that a pid used again is never taken for the client.
        """
        if process.pid <= 0 or process.start_ticks == 0:
            return False
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            return False
        if ProcessIdentity.of(process.pid) != process:
            os.close(pidfd)
            return False
        self._poll.register(pidfd, select.EPOLLIN)
        self._pidfds[token] = pidfd
        self._tokens[pidfd] = token
        return True

    def unwatch(self, token: int) -> None:
        pidfd = self._pidfds.pop(token, None)
        if pidfd is not None:
            self._poll.unregister(pidfd)
            del self._tokens[pidfd]
            os.close(pidfd)

    def dead(self) -> list[int]:
        """Tokens of the processes seen dead; each stays in the answer until it is unwatched."""
        return [self._tokens[pidfd] for pidfd, _ in self._poll.poll(0)]

    def close(self) -> None:
        for token in list(self._pidfds):
            self.unwatch(token)
        self._poll.close()
