"""Running count, mean, spread and range of a field's elements, without keeping a row.

Merging two moments is the pairwise update of Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for computing
sample variances": exact to rounding and independent of the order to the same degree.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replay_server_protocol.errors import ProtocolViolation

Floats = npt.NDArray[np.float64]

RETURN = "return"
"""Name of the running discounted return among the fields whose moments are kept; a field of that name comes first."""

_LARGEST = sys.float_info.max
"""What squares beyond it are taken for: they stay numbers."""
_FEW = 16
"""Of so many numbers Python's own arithmetic is the faster one."""
_TAME = 1e140
"""Numbers up to it have sums and squares that are numbers, too, however many there are."""

Scalars = tuple[int, float, float, float, float]
"""Count, mean, squared deviations, low, high."""
SCALARS = struct.Struct("<Qdddd")


@dataclass(slots=True)
class Moments:
    """Count, mean, sum of squared deviations, minimum and maximum per element of a field (float64, one entry an element)."""

    count: int
    mean: Floats
    squares: Floats
    low: Floats
    high: Floats

    @classmethod
    def empty(cls, elements: int) -> Moments:
        return cls(0, np.zeros(elements), np.zeros(elements), np.full(elements, math.inf), np.full(elements, -math.inf))

    @classmethod
    def of(cls, values: npt.NDArray[np.generic]) -> Moments:
        """Moments of ``values[n, ...]``, n >= 1, over rows that are finite throughout."""
        rows = values.reshape(len(values), -1).astype(np.float64)
        mean = rows.mean(0)
        deviations = rows - mean
        squares = np.minimum(np.einsum("ij,ij->j", deviations, deviations), _LARGEST)
        return cls(len(rows), mean, squares, rows.min(0), rows.max(0))

    def merge(self, other: Moments) -> None:
        """Adds what ``other`` has seen."""
        if other.count == 0:
            return
        total = self.count + other.count
        delta = other.mean - self.mean
        self.squares += other.squares + delta * delta * (self.count * other.count / total)
        self.mean += delta * (other.count / total)
        np.minimum(self.low, other.low, out=self.low)
        np.maximum(self.high, other.high, out=self.high)
        self.count = total

    @property
    def std(self) -> Floats:
        """Population standard deviation; zeros before the first row."""
        return np.sqrt(self.squares / self.count) if self.count else np.zeros_like(self.squares)

    def pack(self) -> bytes:
        """Count (u64) and four float64 an element: mean, squares, low, high."""
        return struct.pack("<Q", self.count) + np.concatenate((self.mean, self.squares, self.low, self.high)).tobytes()

    @classmethod
    def unpack(cls, packed: bytes, elements: int) -> Moments:
        """The moments of ``pack``; raises ProtocolViolation if the length is another field's or a value can't be."""
        if len(packed) != 8 + 32 * elements:
            raise ProtocolViolation(f"moments of {elements} elements have {8 + 32 * elements} bytes, {len(packed)} came")
        (count,) = struct.unpack_from("<Q", packed)
        mean, squares, low, high = np.frombuffer(packed, np.float64, offset=8).reshape(4, elements).copy()
        if count and not (np.isfinite((mean, squares, low, high)).all() and (squares >= 0).all() and (low <= high).all()):
            raise ProtocolViolation("moments must be finite, with squares >= 0 and low <= high")
        return cls(count, mean, squares, low, high)


def pack_scalars(values: npt.NDArray[np.generic]) -> bytes | None:
    """``Moments.of(values).pack()`` of ``values[n]``, n >= 1, in a tenth of the time; None if one is not finite, or their sum isn't.

    At the end of float64's range it depends on the order of the additions whether a sum is finite, and that on n.
    """
    scalars = scalars_of(values)
    return None if scalars is None else SCALARS.pack(*scalars)


def scalars_of(values: npt.NDArray[np.generic] | Sequence[float]) -> Scalars | None:
    """As ``pack_scalars``, not packed."""
    if len(values) <= _FEW:
        return _of_few([float(value) for value in values])
    wide = np.array(values, np.float64)
    low, high = float(np.minimum.reduce(wide)), float(np.maximum.reduce(wide))
    if low >= -_TAME and high <= _TAME:
        return _of(wide, low, high)
    with np.errstate(invalid="ignore", over="ignore"):  # after rows were copied, when all caches are cold, it costs as much as the rest
        return _of(wide, low, high)


def are_tame(scalars: Scalars | None) -> bool:
    """Whether no sum of these values, nor of their squares, is beyond float64."""
    return scalars is not None and scalars[3] >= -_TAME and scalars[4] <= _TAME


def _of(wide: Floats, low: float, high: float) -> Scalars | None:
    mean = float(np.add.reduce(wide)) / len(wide)
    if not math.isfinite(mean):
        return None
    wide -= mean
    return len(wide), mean, min(float(wide.dot(wide)), _LARGEST), low, high


def _of_few(values: list[float]) -> Scalars | None:
    mean = sum(values) / len(values)
    if not math.isfinite(mean):
        return None
    squares = 0.0
    for value in values:
        squares += (value - mean) * (value - mean)
    return len(values), mean, min(squares, _LARGEST), min(values), max(values)
