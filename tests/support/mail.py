"""Mail in tests: the first version that comes. Its news travels by message, so it may arrive after the post has returned."""

from __future__ import annotations

import time

from replay_server_client import Collector
from replay_server_client.mailbox import Mail

_WITHIN_S = 5.0
_ASK_AGAIN_S = 0.001


def wait_mail(collector: Collector, mailbox: str = "policy", newer_than: int = 0) -> Mail:
    """The newest version after ``newer_than``; AssertionError if none comes in time. Polls: ``latest`` doesn't wait for news."""
    end = time.monotonic() + _WITHIN_S
    while (mail := collector.latest(mailbox, newer_than)) is None:
        assert time.monotonic() < end, f"no version of {mailbox!r} after {newer_than} within {_WITHIN_S} s"
        time.sleep(_ASK_AGAIN_S)
    return mail
