"""Draws that favour recent rows: half as likely for every ``half_life_rows`` of age, in closed form, without a pass over the ring.

A row's age is ``a = committed - 1 - seq``, 0 for the newest. With ``r = ln 2 / half_life_rows`` its probability is proportional to
``2^(-a / half_life_rows) = e^(-r a)``, 0 <= a < size: a geometric distribution cut off at the window's end, whose distribution function

    F(a) = (1 - e^(-r (a + 1))) / (1 - e^(-r size))        inverted at u:        a = floor(-log(1 - u (1 - e^(-r size))) / r)

(Devroye, "Non-Uniform Random Variate Generation", 1986, X.2 the geometric distribution, here truncated). ``1 - e^-x`` and
``log(1 - x)`` are taken by expm1 and log1p, so that half-lives far above the window lose no digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from replay_server_client.draw import Drawn, hash_of, shift_right

UNIT_BITS = 53
"""Bits of the hash that make ``u``: a multiple of 2^-53 in [0, 1), as exact as float64 has them."""

_HASH_BITS = 64


def draw_recent(drawn: Drawn, ring_rows: int, half_life_rows: Tensor, function: Callable[..., tuple[Tensor, Tensor]] | None = None) -> None:
    """Draws rows of the window with probability proportional to 2^(-age / half_life_rows), with replacement; ``size`` must be at least 1.

    ``half_life_rows`` is float64 without a dimension, finite and above 0. Rows older than 53 half-lives are never drawn. CPU and CUDA may
    differ by a row where their log1p differs in the last digit. ``function`` stands for ``recent``.
    """
    seqs, indices = (function or recent)(drawn.parameters, drawn.counters, half_life_rows, ring_rows=ring_rows)
    drawn.seqs.copy_(seqs)
    drawn.indices.copy_(indices)


def recent(parameters: Tensor, counters: Tensor, half_life_rows: Tensor, *, ring_rows: int) -> tuple[Tensor, Tensor]:
    """The seqs and ring indices of a draw."""
    key, tail, size = parameters[:3].unbind()
    share = torch.expm1(size / half_life_rows * -math.log(2))
    ages = torch.log1p(units_of(hash_of(counters, key)) * share * 2.0**-UNIT_BITS) * half_life_rows * (-1 / math.log(2))
    seqs = torch.maximum(tail + size - 1 - ages.long(), tail)
    return seqs, seqs % ring_rows


def units_of(hashes: Tensor) -> Tensor:
    """``u × 2^53``, int64."""
    units: Tensor = shift_right(hashes, _HASH_BITS - UNIT_BITS)
    return units
