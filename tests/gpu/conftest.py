"""What tests of the GPU need before any leak check looks."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _cuda_is_warm() -> None:
    from support.gpu import warm_up

    warm_up()
