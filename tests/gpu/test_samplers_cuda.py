"""The promises of every way to sample with the ring on the GPU, and with a host ring whose batches are copied to the GPU."""

from __future__ import annotations

import pytest
from conformance.replay import Storage
from conformance.samplers import SamplerPromises

pytestmark = pytest.mark.gpu


class TestCudaRing(SamplerPromises):
    @pytest.fixture
    def storage(self) -> Storage:
        return Storage(server=("--device", "cuda"), device="cuda")


class TestHostRingOfACudaLearner(SamplerPromises):
    @pytest.fixture
    def storage(self) -> Storage:
        return Storage(server=("--device", "cuda", "--storage", "host"), device="cuda")
