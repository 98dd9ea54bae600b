"""Cases of a parametrized test that a short run leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def rarely(*values: object) -> list[Any]:
    """For ``parametrize``: these values are played with ``--all`` alone."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
