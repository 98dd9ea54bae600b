"""What a learner asks for: the arguments of a sampler, checked, and where its draws start from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TypedDict, TypeGuard, Unpack

import numpy as np
from replay_server_protocol.errors import InvalidRequest, shown

from replay_server_client.draw import request_key

BY = ("uniform", "priority")
"""The values of ``by``."""

_MOST_STEPS = 1 << 16
_LARGEST_EXPONENTS = {"alpha": 2.0, "beta": 1000.0}
"""The largest priority to the power of 2 is within float32."""


class RequestOptions(TypedDict, total=False):
    """Arguments of ``Learner.sampler`` that every way to sample takes.

    ``by``: "uniform", or "priority" (proportional; needs ``serve --columns priority``).
    ``max_age_rows``: draw from the newest so many rows only.
    ``half_life_rows``: a row so many rows older than the newest one is half as likely as that.
    ``strict``: raise when ``update_priorities`` was given values that are not finite and 0 or above, instead of warning once.
    """

    by: str
    max_age_rows: int | None
    half_life_rows: float | None
    strict: bool


@dataclass(frozen=True, slots=True)
class Request:
    """What distinguishes samplers. Equal requests share batch buffers.

    A request of ``length`` 0 draws transitions of ``n_step`` steps, discounted by ``gamma``; one of more draws windows of ``length`` rows,
    every ``stride``-th of a lane, the first ``burn_in`` of which only warm up a recurrent state.
    """

    n: int
    by: str = "uniform"
    max_age_rows: int | None = None
    half_life_rows: float | None = None
    strict: bool = False
    n_step: int = 1
    gamma: float = 0.99
    length: int = 0
    burn_in: int = 0
    stride: int = 1
    crosses_episodes: bool = False
    tells_mass: bool = False  # by priority: each draw's mass, and the window's sum and least, for weights over several shards

    @classmethod
    def transitions(cls, n: int, *, n_step: int = 1, gamma: float = 0.99, **options: Unpack[RequestOptions]) -> Request:
        """Raises InvalidRequest naming the argument that is wrong."""
        steps = _count("n_step", n_step, 1, "steps of a lane")
        if steps > _MOST_STEPS:
            raise InvalidRequest(f"n_step={steps:,}: at most {_MOST_STEPS:,} steps")
        if not _is_number(gamma) or not 0 <= gamma <= 1:
            raise InvalidRequest(f"gamma={shown(gamma)}: the discount of a step, 0 to 1")
        return cls(_count("n", n, 1, "rows of a batch"), n_step=steps, gamma=float(gamma), **_checked(options))

    @classmethod
    def sequences(
        cls, n: int, *, length: int, burn_in: int, stride: int, crosses_episodes: bool, **options: Unpack[RequestOptions]
    ) -> Request:
        """Raises InvalidRequest naming the argument that is wrong."""
        n = _count("n", n, 1, "sequences of a batch")
        length = _count("length", length, 1, "rows of a sequence")
        burn_in = _count("burn_in", burn_in, 0, "first rows of a sequence")
        stride = _count("stride", stride, 1, "steps of the lane from one row to the next")
        if (length - 1) * stride >= _MOST_STEPS:
            raise InvalidRequest(f"length={length:,}, stride={stride:,}: a sequence spans at most {_MOST_STEPS:,} steps")
        if burn_in >= length:
            raise InvalidRequest(f"burn_in={burn_in}: below length={length}")
        if not isinstance(crosses_episodes, bool):
            raise InvalidRequest(f"crosses_episodes={shown(crosses_episodes)}: True or False")
        return cls(n, length=length, burn_in=burn_in, stride=stride, crosses_episodes=crosses_episodes, **_checked(options))

    @property
    def rows(self) -> int:
        """Rows of a batch; what counts as sampled."""
        return self.n * max(1, self.length)

    @property
    def shape(self) -> tuple[int, ...]:
        """Leading dimensions of a batch's fields."""
        return (self.n, self.length) if self.length else (self.n,)

    @property
    def is_by_priority(self) -> bool:
        return self.by == "priority"

    @property
    def is_plain(self) -> bool:
        """Uniform draws of single rows."""
        return self.is_one_step and not self.is_by_priority and self.half_life_rows is None

    @property
    def is_one_step(self) -> bool:
        return self.n_step == 1 and not self.length

    @property
    def follows_links(self) -> bool:
        return self.n_step > 1 or self.length > 0

    def describe(self) -> str:
        return f"sequences({self.n:,}, length={self.length:,})" if self.length else f"sample({self.n:,})"


def with_masses(request: Request) -> Request:
    """The same request by priority, whose draws tell their masses too."""
    return replace(request, tells_mass=True)


@dataclass(frozen=True, slots=True)
class Seeds:
    """What the draws of one learner start from, besides the server's seed."""

    learner_seed: int
    learner_name: str

    def key(self, server_seed: int, sampler_ordinal: int, number: int) -> int:
        return request_key(server_seed, self.learner_seed, self.learner_name, sampler_ordinal, number)


def is_count(value: object, low: int) -> bool:
    return type(value) is int and low <= value < 2**63


def check_exponent(name: str, value: object) -> float:
    """Returns alpha or beta; raises InvalidRequest by name."""
    most = _LARGEST_EXPONENTS[name]
    if not _is_number(value) or not 0 <= value <= most:
        raise InvalidRequest(f"{name}={shown(value)}: an exponent, 0 to {most:g}")
    return float(value)


def _checked(options: RequestOptions) -> RequestOptions:
    if unknown := set(options) - set(RequestOptions.__annotations__):
        raise InvalidRequest(
            f"{', '.join(sorted(unknown))}: no argument of this way to sample; there is {', '.join(RequestOptions.__annotations__)}"
        )
    checked = options.copy()
    by, half_life_rows, strict = options.get("by", "uniform"), options.get("half_life_rows"), options.get("strict", False)
    if not isinstance(by, str) or by not in BY:
        raise InvalidRequest(f"by={shown(by)}: one of {', '.join(map(repr, BY))}")
    if options.get("max_age_rows") is not None:
        checked["max_age_rows"] = _count("max_age_rows", options["max_age_rows"], 1, "the newest so many rows, or None")
    if half_life_rows is not None and not (_is_number(half_life_rows) and 0 < half_life_rows < math.inf):
        raise InvalidRequest(f"half_life_rows={shown(half_life_rows)}: rows, above 0, or None")
    if half_life_rows is not None:
        checked["half_life_rows"] = float(half_life_rows)
    if not isinstance(strict, bool):
        raise InvalidRequest(f"strict={shown(strict)}: True or False")
    return checked


def _count(name: str, value: object, low: int, what: str) -> int:
    """An int of Python's or numpy's kinds as Python's."""
    count = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if count is None or not is_count(count, low):
        raise InvalidRequest(f"{name}={shown(value)}: {what}, at least {low}")
    return count


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False
