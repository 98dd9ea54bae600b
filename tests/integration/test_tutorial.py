"""The tutorial's program runs as the page shows it, and its agent learns."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.processes import Children

AGENT = Path(__file__).parents[2] / "scripts" / "tutorial_agent.py"


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "least"), [(200, 1.0), (15_000, 60.0)], ids=["a short run ends in order", "a whole run learns"])
def test_the_tutorials_agent(children: Children, updates: int, least: float) -> None:
    child = children.start([sys.executable, "-W", "error", str(AGENT), str(updates)], name="tutorial", deadline_s=110.0)
    assert child.wait() == 0, child.output
    reached = re.search(r"mean return of 10 episodes: (\d+)", child.output)
    assert reached is not None
    assert float(reached[1]) >= least
