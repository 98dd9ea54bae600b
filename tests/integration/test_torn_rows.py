"""Self-verifying rows on the CPU ring: more than a million sampled rows in three stories."""

from __future__ import annotations

import pytest
from conformance.whole_rows import Load, WholeRowsPromises


class TestCpuRing(WholeRowsPromises):
    @pytest.fixture
    def load(self) -> Load:
        return Load(server=(), device="cpu", width=32, batch_rows=512, least_rows=400_000, wraps=25)
