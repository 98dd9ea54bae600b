"""The promises of the whole system with the ring on the GPU, and with a host ring whose batches are copied to the GPU."""

from __future__ import annotations

import pytest
from conformance.replay import ReplayPromises, Storage

pytestmark = pytest.mark.gpu


class TestCudaRing(ReplayPromises):
    @pytest.fixture
    def storage(self) -> Storage:
        return Storage(server=("--device", "cuda"), device="cuda")


class TestHostRingOfACudaLearner(ReplayPromises):
    @pytest.fixture
    def storage(self) -> Storage:
        return Storage(server=("--device", "cuda", "--storage", "host"), device="cuda")
