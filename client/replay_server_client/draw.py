"""Which rows a batch holds: a pure function of (key, window, n), the same code and the same rows on CPU and CUDA.

Row i of a batch is ``tail + hash(key, i) mod size``. The hash is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014; constants of Stafford's variant 13) over ``key + i × golden gamma``, in wrapping int64
arithmetic. Taking 63 bits modulo ``size`` favours no row by more than size / 2^63.

Everything that changes from draw to draw is an element of one int64 tensor and every result has a fixed address, so that a draw can be
captured in a CUDA graph: no value is read on the host, no shape or branch depends on one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PARAMETERS = 3
"""Elements of ``Drawn.parameters``: key, tail, size."""

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31
_NON_NEGATIVE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Drawn:
    """The fixed memory of one draw of ``n`` rows: ``parameters`` go in, ``seqs``, ``indices`` and ``weights`` come out."""

    parameters: Tensor  # int64[PARAMETERS]
    seqs: Tensor  # int64[n]: absolute numbers of the rows
    indices: Tensor  # int64[n]: seqs modulo ring rows
    weights: Tensor  # float32[n]: importance weights, 1 for a uniform draw
    counters: Tensor  # int64[n]: multiples of the golden gamma
    scratch: Tensor  # int64[n]

    @classmethod
    def of(cls, n: int, device: torch.device) -> Drawn:
        return cls.into(torch.zeros(2 * n, dtype=torch.int64, device=device))

    @classmethod
    def into(cls, results: Tensor) -> Drawn:
        """A draw whose ``seqs`` and ``indices`` are the halves of ``results``, ``int64[2n]``."""
        seqs, indices = results.view(2, -1).unbind()
        n, device = len(seqs), results.device
        parameters = torch.zeros(PARAMETERS, dtype=torch.int64, device=device)
        counters = torch.arange(1, n + 1, device=device).mul_(_GOLDEN_GAMMA)
        return cls(parameters, seqs, indices, torch.ones(n, dtype=torch.float32, device=device), counters, torch.zeros_like(seqs))


Draw = Callable[[Drawn, int], None]
"""A way to draw: writes the results of ``drawn`` from its parameters; the second argument is the ring's number of rows."""


def draw_uniform(drawn: Drawn, ring_rows: int) -> None:
    """Every row of the window equally likely, with replacement; ``size`` must be at least 1."""
    key, tail, size = drawn.parameters.unbind()
    hash_into(key, drawn.counters, drawn.seqs, drawn.scratch)
    drawn.seqs.bitwise_and_(_NON_NEGATIVE).remainder_(size).add_(tail)
    torch.remainder(drawn.seqs, ring_rows, out=drawn.indices)


DRAWS: dict[str, Draw] = {"uniform": draw_uniform}
"""The values of ``by``."""


def hash_into(key: Tensor, counters: Tensor, out: Tensor, scratch: Tensor) -> None:
    """Writes the 64-bit hash of (``key``, each counter) to ``out``."""
    torch.add(counters, key, out=out)
    for shift, factor in _ROUNDS:
        _xor_shift(out, shift, scratch)
        out.mul_(factor)
    _xor_shift(out, _LAST_SHIFT, scratch)


def request_key(server_seed: int, learner_seed: int, learner_name: str, sampler_ordinal: int, number: int) -> int:
    """The key of request ``number``: a signed 64-bit hash, so that any of its parts gives independent draws."""
    parts = f"{server_seed}/{learner_seed}/{learner_name}/{sampler_ordinal}/{number}"
    return int.from_bytes(hashlib.blake2b(parts.encode(), digest_size=8).digest(), "little", signed=True)


def _xor_shift(values: Tensor, shift: int, scratch: Tensor) -> None:
    torch.bitwise_right_shift(values, shift, out=scratch)
    scratch.bitwise_and_(2 ** (64 - shift) - 1)  # torch shifts arithmetically: clear the copies of the sign
    values.bitwise_xor_(scratch)
