"""Under which names the actors of a cluster are found."""

from __future__ import annotations

NAMESPACE = "replay"
HOST_PREFIX = "replay-host:"
FORWARDER_PREFIX = "replay-forwarder:"
