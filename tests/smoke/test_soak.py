"""The soak runs, for a few seconds: its clients attach, come, go and are killed, every row is judged, its record is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "soak.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_few_seconds_of_mixed_load_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--device", "cpu", "--output", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    record = json.loads((tmp_path / "soak.json").read_text("utf-8"))
    assert record["raw"]["faults"] == []
    assert record["raw"]["totals"]["rows (sample)"] > 0
    assert all(target["is_met"] for target in record["targets"])
    assert (tmp_path / "soak.txt").read_text("utf-8").count("RSS MB") > 2
