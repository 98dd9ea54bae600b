"""Whether the server's process is still there, seen by a descriptor of the process. Where there is none, silence is all there is to see."""

from __future__ import annotations

import os
import select
import time

from replay_server_protocol.process import ProcessIdentity

_LOOK_EVERY_S = 0.01


class ServerWatch:
    """Watches one process, from ``watch`` to ``forget``. ``pidfd`` is readable once it has ended; None while none can be watched."""

    def __init__(self) -> None:
        self.pidfd: int | None = None
        self._look_again_s = 0.0

    def watch(self, server: ProcessIdentity) -> None:
        """Watches this very process, if it is one of this PID namespace and its start is known."""
        if not hasattr(os, "pidfd_open"):
            return
        try:
            pidfd = os.pidfd_open(server.pid)
        except OSError:
            return  # another PID namespace
        if server.start_ticks and ProcessIdentity.of(server.pid) == server:
            self.pidfd = pidfd
        else:
            os.close(pidfd)

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether the process is known to be gone, or goes within that time; a microsecond."""
        if self.pidfd is None:
            return False
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def is_seen_ended(self) -> bool:
        """As ``has_ended``. For whoever asks after every read: it looks only now and then, and at once after ``look_at_once``."""
        now_s = time.monotonic()
        if self.pidfd is None or now_s < self._look_again_s:
            return False
        self._look_again_s = now_s + _LOOK_EVERY_S
        return self.has_ended()

    def look_at_once(self) -> None:
        """Time has passed in a sleep: the next ``is_seen_ended`` looks."""
        self._look_again_s = 0.0

    def forget(self) -> None:
        """Watches nothing. Done again from its beginning where Ctrl-C ended it."""
        pidfd, self.pidfd = self.pidfd, None  # before it is closed: its number may be another's at once
        if pidfd is not None:
            os.close(pidfd)
