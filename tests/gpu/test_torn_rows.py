"""Self-verifying rows on the GPU: ten million sampled rows in each story, checked where they lie."""

from __future__ import annotations

import pytest
from conformance.whole_rows import Load, WholeRowsPromises

pytestmark = pytest.mark.gpu


class TestCudaRing(WholeRowsPromises):
    @pytest.fixture
    def load(self) -> Load:
        return Load(server=("--device", "cuda"), device="cuda", width=216, batch_rows=8192, least_rows=10_000_000, wraps=200)


class TestHostRingOfACudaLearner(WholeRowsPromises):
    @pytest.fixture
    def load(self) -> Load:
        storage = ("--device", "cuda", "--storage", "host")
        return Load(server=storage, device="cuda", width=216, batch_rows=1024, least_rows=1_000_000, wraps=40)
