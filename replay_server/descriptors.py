"""Descriptors the server may still open: a client is refused while there is room to tell it, not when there is none left to hear it.

```
limit ─────────────────────────────────────────────────────────────────────────────── EMFILE: libzmq ends the process
      ▲ shut_below: nobody is accepted any more (entrance.py)
      ▲ reserve: a client is refused by name
```
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from dataclasses import dataclass

from replay_server_protocol.errors import AttachRefused, InvalidRequest
from replay_server_protocol.process import can_start_threads

log = logging.getLogger("replay_server")

OF_A_CLIENT = 4
"""Its connection, its pidfd, its slots, and one more while they are made."""
_MOST = 1 << 20
_OWN = 28
"""Sockets, their threads and the lock, and what a device opens."""
_THREADS = 4
"""libzmq's two, and what a device starts."""
_LEAST_SAFE = 1024
"""libzmq accepts hundreds of connections in the milliseconds in which a busy machine doesn't run the loop, which shuts the doors."""
_LEAST_RESERVE, _LARGEST_RESERVE = 32, 2048


def raise_limit() -> None:
    """Lets this process open as many files as the system allows it.

    The soft limit is low for the sake of programs that call select(2); nothing here does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass(frozen=True, slots=True)
class Room:
    """What is kept free of ``limit``, for those attached, mailboxes, status clients and the connections of those that will be refused."""

    limit: int
    reserve: int
    shut_below: int
    open_from: int

    @classmethod
    def of_this_process(cls) -> Room:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls.of_limit(2**31 if soft == resource.RLIM_INFINITY else soft)

    @classmethod
    def of_limit(cls, limit: int) -> Room:
        reserve = max(_LEAST_RESERVE, min(limit // 4, _LARGEST_RESERVE))
        return cls(limit, reserve, reserve // 2, reserve // 4 * 3)

    def free(self) -> int:
        """How many more files may be opened; about 20 us."""
        return self.limit - self.used()

    def used(self) -> int:
        try:
            return len(os.listdir("/proc/self/fd")) - 1  # less the listing's own
        except FileNotFoundError:  # no /proc here
            return self.limit - _openable(_OWN + OF_A_CLIENT + self.reserve)
        except OSError:  # not even that one could be opened
            return self.limit


def check_descriptors() -> None:
    """Raises AttachRefused when another client would use up what this process may open."""
    room = Room.of_this_process()
    used = room.used()
    if used + OF_A_CLIENT + room.reserve > room.limit:
        raise AttachRefused(
            f"the server has {used} files open and may have {room.limit}, of which {room.reserve} are kept in reserve: no further client "
            "can attach; close one, or start the server with a higher limit (ulimit -n, LimitNOFILE=, docker --ulimit nofile)",
            used=used,
            limit=room.limit,
        )


def require_descriptors() -> None:
    """For the server's start. Raises InvalidRequest when its own sockets and one client would already touch the reserve."""
    room = Room.of_this_process()
    needed = room.used() + _OWN + OF_A_CLIENT + room.reserve
    if needed > room.limit:
        raise InvalidRequest(f"the server may open {room.limit} files and needs {needed} at least: raise the limit (ulimit -n)")
    if room.limit < _LEAST_SAFE:
        log.warning(
            "the server may open %d files, below %d: hundreds of clients that connect at once may end it; raise the hard limit "
            "(ulimit -Hn, LimitNOFILE=, docker --ulimit nofile)",
            room.limit,
            _LEAST_SAFE,
        )


def require_threads() -> None:
    """For the server's start. Raises InvalidRequest when libzmq could not start its threads."""
    if not can_start_threads(_THREADS):
        raise InvalidRequest(
            f"the server needs {_THREADS} threads and can't start them: raise the limit on processes (ulimit -u, docker --pids-limit, "
            "pids.max of its control group)"
        )


def _openable(most: int) -> int:
    with contextlib.ExitStack() as opened:
        for n in range(most):
            try:
                opened.callback(os.close, os.open("/", os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                return n
    return most
