"""The promises of the whole system with the ring in shared memory, as ``--device cpu`` and as ``--storage host`` keep it."""

from __future__ import annotations

import pytest
from conformance.replay import ReplayPromises, Storage


class TestCpuRing(ReplayPromises):
    @pytest.fixture
    def storage(self) -> Storage:
        return Storage(server=(), device="cpu")


class TestHostRing(ReplayPromises):
    @pytest.fixture
    def storage(self) -> Storage:
        return Storage(server=("--storage", "host"), device="cpu")
