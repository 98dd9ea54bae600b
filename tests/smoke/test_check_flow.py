"""The check of flow control over minutes runs, for a few seconds: its clients attach, its figures add up, its record is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_flow.py"


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_few_seconds_of_bursts_and_pauses_stay_in_the_band(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--minutes", "0.05", "--output", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=190, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    record = json.loads((tmp_path / "check_flow.json").read_text("utf-8"))
    assert len(record["targets"]) == 4
    assert all(target["is_met"] for target in record["targets"])
    assert record["raw"]["looks"] >= 10
