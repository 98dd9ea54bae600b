"""What a publish says of the episodes that ended in it: sums over all of them, and the last ones one by one.

```
|count mean squares low high|  the same   |return length|return length| …   at most LAST_EPISODES pairs, the newest last
|<---- of the returns ----->|<- lengths ->|<------------- float64 ------------->|
```
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.moments import Scalars, scalars_of

LAST_EPISODES = 100

_HEAD = struct.Struct("<QddddQdddd")
_PAIR = struct.Struct("<dd")


class EndedEpisodes(NamedTuple):
    returns: Scalars
    lengths: Scalars
    last: list[tuple[float, float]]
    """(return, length) of the newest ones, in order of their ends."""


def pack_episodes(ended: Sequence[tuple[float, int]]) -> bytes:
    """Packs (return, length) pairs, in order of their ends, with finite returns; empty for none, or for returns beyond float64 in sum."""
    if not ended:
        return b""
    returns, lengths = (scalars_of(part) for part in zip(*ended, strict=True))
    if returns is None or lengths is None:
        return b""
    return b"".join((_HEAD.pack(*returns, *lengths), *(_PAIR.pack(*pair) for pair in ended[-LAST_EPISODES:])))


def unpack_episodes(packed: bytes) -> EndedEpisodes:
    """The episodes of ``pack_episodes``, not of the empty ones; raises ProtocolViolation if they can't be."""
    if len(packed) < _HEAD.size or (len(packed) - _HEAD.size) % _PAIR.size:
        raise ProtocolViolation(f"episodes can't have {len(packed)} bytes")
    head = _HEAD.unpack_from(packed)
    returns, lengths = head[:5], head[5:]
    last = list(_PAIR.iter_unpack(packed[_HEAD.size :]))
    if not returns[0] or returns[0] != lengths[0] or len(last) != min(returns[0], LAST_EPISODES):
        raise ProtocolViolation(f"{returns[0]} returns, {lengths[0]} lengths and {len(last)} last episodes don't go together")
    for _, mean, squares, low, high in (returns, lengths):
        if not (math.isfinite(mean) and 0 <= squares < math.inf and -math.inf < low <= high < math.inf):
            raise ProtocolViolation("episodes must have finite sums, with squares >= 0 and low <= high")
    if lengths[3] < 1 or not all(math.isfinite(total) and 1 <= length < math.inf for total, length in last):
        raise ProtocolViolation("an episode has a finite return and at least one row")
    return EndedEpisodes(returns, lengths, last)
