"""The promises of every way to sample with the ring in shared memory, as ``--device cpu`` and as ``--storage host`` keep it."""

from __future__ import annotations

import pytest
from conformance.replay import Storage
from conformance.samplers import SamplerPromises


class TestCpuRing(SamplerPromises):
    @pytest.fixture
    def storage(self) -> Storage:
        return Storage(server=(), device="cpu")


class TestHostRing(SamplerPromises):
    @pytest.fixture
    def storage(self) -> Storage:
        return Storage(server=("--storage", "host"), device="cpu")
