"""Collectors of one node over the rings of several: each is pinned to one shard, so that its episodes lie in one ring.

Which one follows from the collector's name and the list of shards alone: the same after any restart, on every node. Nobody is moved, also
not while a shard is lost: its collectors wait.
"""

from __future__ import annotations

import select
import zlib
from collections.abc import Mapping, Sequence

from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.passing import PASSED_OPTIONS, Committed, Passed
from replay_server_protocol.schema import Schema

from replay_server_client.ray.carrier import CarrierCounts, ChunkCarrier


def shard_of(collector: str, shards: Sequence[str]) -> str:
    """The shard that ``collector`` is pinned to."""
    return shards[zlib.crc32(collector.encode()) % len(shards)]


class Spread:
    """The carriers of several shards as one."""

    def __init__(self, carriers: Mapping[str, ChunkCarrier]) -> None:
        """Raises InvalidRequest without a shard."""
        if not carriers:
            raise InvalidRequest("shards=[]: a forwarder needs one at least")
        self._carriers = dict(carriers)
        self._shards = tuple(carriers)
        self._shard_of_origin: dict[str, str] = {}
        self._wake = select.epoll()
        for carrier in carriers.values():
            self._wake.register(carrier.fileno(), select.EPOLLIN)

    def start(self) -> None:
        for carrier in self._carriers.values():
            carrier.start()

    def close(self) -> None:
        for carrier in self._carriers.values():
            carrier.close()
        self._wake.close()

    def agree(self, schema: Schema) -> dict[str, object]:
        """Asks every shard; slots of this node suit all or none. Raises InvalidRequest naming the shard whose options differ."""
        agreed = {shard: carrier.agree(schema) for shard, carrier in self._carriers.items()}
        first = agreed[self._shards[0]]
        for shard, options in agreed.items():
            different = [name for name in PASSED_OPTIONS if options.get(name) != first.get(name)]
            if different:
                values = f"{first.get(different[0])} and {options.get(different[0])}"
                raise InvalidRequest(
                    f"shards {self._shards[0]!r} and {shard!r} of one forwarder were started with different "
                    f"--{different[0].replace('_', '-')}: {values}; start them alike"
                )
        return first

    def carry(self, passed: Passed) -> None:
        shard = self._shard_of_origin.setdefault(passed.origin, shard_of(passed.collector, self._shards))
        self._carriers[shard].carry(passed)

    def forget(self, origin: str) -> None:
        shard = self._shard_of_origin.pop(origin, None)
        if shard is not None:
            self._carriers[shard].forget(origin)

    def fileno(self) -> int:
        return self._wake.fileno()

    def take_committed(self) -> list[Committed]:
        return [committed for carrier in self._carriers.values() for committed in carrier.take_committed()]

    def why_waiting(self) -> str:
        return "; ".join(f"shard {shard!r}: {carrier.why_waiting()}" for shard, carrier in self._carriers.items() if carrier.is_waiting)

    def counts(self) -> dict[str, CarrierCounts]:
        return {shard: carrier.counts() for shard, carrier in self._carriers.items()}
