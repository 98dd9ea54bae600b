"""Cases of a parametrized test that a short run leaves out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def rarely(*values: object) -> list[Any]:
    """For ``parametrize``: these values are played with ``--all`` alone."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def combined(always: Collection[tuple[object, ...]], *values: Iterable[object]) -> list[Any]:
    """For ``parametrize`` with several names: all combinations of their values, those in ``always`` also in a short run."""
    return [pytest.param(*each, marks=() if each in always else pytest.mark.slow) for each in product(*values)]
