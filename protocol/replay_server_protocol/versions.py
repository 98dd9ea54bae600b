"""What a publish says of the policies that made its rows: (version, rows) pairs, few however many versions there are."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from replay_server_protocol.errors import ProtocolViolation

MOST_PAIRS = 16

_PAIR = struct.Struct("<qQ")
_LARGEST = 2**63 - 1


def pack_versions(column: npt.NDArray[np.integer]) -> bytes:
    """Counts the rows of each version in ``column[n]``, n >= 1, the oldest version first.

    Where there are more than MOST_PAIRS, neighbours share a pair under the oldest version among them: rows never look fresher than they
    are.
    """
    low, high = int(column.min()), int(column.max())
    if low == high:  # the usual slot
        return _PAIR.pack(min(low, _LARGEST), len(column))
    versions, rows = np.unique(column, return_counts=True)
    if len(versions) > MOST_PAIRS:
        firsts = np.arange(MOST_PAIRS) * len(versions) // MOST_PAIRS
        versions, rows = versions[firsts], np.add.reduceat(rows, firsts)
    return b"".join(_PAIR.pack(min(int(version), _LARGEST), int(n)) for version, n in zip(versions, rows, strict=True))


def unpack_versions(packed: bytes) -> list[tuple[int, int]]:
    """The pairs of ``pack_versions``; raises ProtocolViolation if they can't be."""
    if len(packed) % _PAIR.size or len(packed) > MOST_PAIRS * _PAIR.size:
        raise ProtocolViolation(f"versions are at most {MOST_PAIRS} pairs of {_PAIR.size} bytes, {len(packed)} came")
    return list(_PAIR.iter_unpack(packed))
