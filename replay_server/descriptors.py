"""Descriptors the server may still open: a client is refused while there is room to tell it, not when there is none left to hear it."""

from __future__ import annotations

import os
import resource

from replay_server_protocol.errors import AttachRefused, InvalidRequest

OF_A_CLIENT = 4
"""Its connection, its pidfd, its slots, and one more while they are made."""
_MOST = 1 << 20
_OWN = 24
"""Sockets, their threads and the lock, and what a device opens."""
RESERVE = 32
"""Kept for those attached, for mailboxes, status clients and the connections of those that will be refused."""


def raise_limit() -> None:
    """Lets this process open as many files as the system allows it: without a descriptor for the next connection libzmq ends the process.

    The soft limit is low for the sake of programs that call select(2); nothing here does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_descriptors() -> None:
    """Raises AttachRefused when another client would use up what this process may open; about 20 us."""
    limit = limit_of_descriptors()
    used = _open_descriptors(limit)
    if used + OF_A_CLIENT + RESERVE > limit:
        raise AttachRefused(
            f"the server has {used} files open and may have {limit}, of which {RESERVE} are kept in reserve: no further client can attach; "
            "close one, or start the server with a higher limit (ulimit -n, LimitNOFILE=, docker --ulimit nofile)",
            used=used,
            limit=limit,
        )


def require_descriptors() -> None:
    """For the server's start. Raises InvalidRequest when its own sockets and one client would already touch the reserve."""
    limit = limit_of_descriptors()
    needed = _open_descriptors(limit) + _OWN + OF_A_CLIENT + RESERVE
    if needed > limit:
        raise InvalidRequest(f"the server may open {limit} files and needs {needed} at least: raise the limit (ulimit -n)")


def limit_of_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft


def _open_descriptors(limit: int) -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # less the listing's own
    except OSError:  # not even that one could be opened
        return limit
