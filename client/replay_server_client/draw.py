"""Which rows a batch holds: a pure function of (key, window, n), the same code and the same rows on CPU and CUDA.

Row i of a batch is ``tail + hash(key, i) mod size``. The hash is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014; constants of Stafford's variant 13) over ``key + i × golden gamma``, in wrapping int64
arithmetic. Taking 63 bits modulo ``size`` favours no row by more than size / 2^63.

Everything that changes from draw to draw is an element of one int64 tensor and every result has a fixed address, so that a draw can be
captured in a CUDA graph: no value is read on the host, no shape or branch depends on one. What is computed on the way lies in the graph's
memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

PARAMETERS = 8
"""Elements of ``Drawn.parameters``, as ``Parameters`` lays them out."""

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31
_NON_NEGATIVE = 2**63 - 1

_INTEGERS = 5


class Parameters(NamedTuple):
    """What changes from draw to draw. The flags say whether something was written about the batch before (see write_back)."""

    key: int
    tail: int
    size: int
    has_priorities: int = 0
    has_values: int = 0
    alpha: float = 0.0
    beta: float = 0.0
    half_life_rows: float = 0.0

    def write_to(self, memory: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Lays them out in ``memory``, ``int64[PARAMETERS]``: the integers, then the others as float64."""
        memory[:_INTEGERS] = self[:_INTEGERS]
        memory[_INTEGERS:].view(np.float64)[:] = self[_INTEGERS:]


Ints = Any
"""int64 numbers: a tensor, or an array that is a view of one. The functions here compute with either, and wrap."""


class Operands(NamedTuple):
    """A draw's memory as it computes with it: arrays on the CPU, where a call of torch costs more than 2,048 sums."""

    parameters: Ints  # [PARAMETERS]
    counters: Ints  # [n]: multiples of the golden gamma
    seqs: Ints  # [n]
    indices: Ints  # [n]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The fixed memory of one draw of ``n`` rows: ``parameters`` go in, ``seqs``, ``indices`` and ``weights`` come out."""

    parameters: Tensor  # int64[PARAMETERS]
    counters: Tensor  # int64[n]: multiples of the golden gamma
    seqs: Tensor  # int64[n]: absolute numbers of the rows
    indices: Tensor  # int64[n]: seqs modulo ring rows
    weights: Tensor  # float32[n]: importance weights, 1 for a uniform draw
    operands: Operands  # the same memory

    @classmethod
    def of(cls, n: int, device: torch.device) -> Drawn:
        seqs, indices = torch.zeros(2, n, dtype=torch.int64, device=device).unbind()
        return cls.into(seqs, indices, torch.ones(n, dtype=torch.float32, device=device))

    @classmethod
    def into(cls, seqs: Tensor, indices: Tensor, weights: Tensor) -> Drawn:
        """A draw with the given memory for its results."""
        parameters = torch.zeros(PARAMETERS, dtype=torch.int64, device=seqs.device)
        counters = torch.arange(1, len(seqs) + 1, device=seqs.device) * _GOLDEN_GAMMA
        operands = parameters, counters, seqs, indices
        if seqs.device.type == "cpu":
            return cls(parameters, counters, seqs, indices, weights, Operands(*(tensor.numpy() for tensor in operands)))
        return cls(parameters, counters, seqs, indices, weights, Operands(*operands))

    def parameter(self, name: str) -> Tensor:
        """The parameter of that name in ``parameters``: int64 or float64 without a dimension."""
        place = Parameters._fields.index(name)
        return self.parameters[place] if place < _INTEGERS else self.parameters[_INTEGERS:].view(torch.float64)[place - _INTEGERS]


def draw_uniform(drawn: Drawn, ring_rows: int, function: Callable[..., tuple[Ints, Ints]] | None = None) -> None:
    """Every row of the window equally likely, with replacement; ``size`` must be at least 1. ``function`` stands for ``uniform``."""
    on = drawn.operands
    on.seqs[:], on.indices[:] = (function or uniform)(on.parameters, on.counters, ring_rows=ring_rows)


def uniform(parameters: Ints, counters: Ints, *, ring_rows: int) -> tuple[Ints, Ints]:
    """The seqs and ring indices of a draw."""
    seqs = uniform_seqs(hash_of(counters, parameters[0]), parameters[1], parameters[2])
    return seqs, seqs % ring_rows


def uniform_seqs(hashes: Ints, tail: Ints, size: Ints) -> Ints:
    seqs = hashes & _NON_NEGATIVE
    seqs %= size
    seqs += tail
    return seqs


def hash_of(counters: Ints, key: Ints) -> Ints:
    """The 64-bit hash of (``key``, each counter)."""
    bits = counters + key
    for shift, factor in _ROUNDS:
        bits ^= shift_right(bits, shift)
        bits *= factor
    bits ^= shift_right(bits, _LAST_SHIFT)
    return bits


def shift_right(bits: Ints, shift: int) -> Ints:
    """Of 64 bits without a sign; the shift of int64 is arithmetic, which copies the sign."""
    bits = bits >> shift
    bits &= 2 ** (64 - shift) - 1
    return bits


def request_key(server_seed: int, learner_seed: int, learner_name: str, sampler_ordinal: int, number: int) -> int:
    """The key of request ``number``: a signed 64-bit hash, so that any of its parts gives independent draws."""
    parts = f"{server_seed}/{learner_seed}/{learner_name}/{sampler_ordinal}/{number}"
    return int.from_bytes(hashlib.blake2b(parts.encode(), digest_size=8).digest(), "little", signed=True)
