"""The blocks of docs/sampling.md are one script that runs as it stands; the examples it names run by one command and end by themselves."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from support.processes import Children

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "sampling.md"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = ("example_nstep_sac.py", "example_sequences.py")
LONGEST_S = 110.0


def test_the_blocks_of_the_page_are_one_script(children: Children, tmp_path: Path) -> None:
    script = tmp_path / "sampling.py"
    script.write_text("\n".join(FENCE.findall(PAGE.read_text("utf-8"))), "utf-8")
    child = children.start([sys.executable, "-W", "error", str(script)], name="sampling.md", deadline_s=LONGEST_S)
    assert child.wait() == 0, child.output
    assert "LearnerStatistics(" in child.output


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_by_one_command(children: Children, name: str) -> None:
    command = [sys.executable, str(CHECKOUT / "scripts" / name), "--quick", "--json"]
    child = children.start(command, name=name, deadline_s=LONGEST_S)
    assert child.wait() == 0, child.output
    assert json.loads(child.output.strip().splitlines()[-1])["machine"]["python"]
