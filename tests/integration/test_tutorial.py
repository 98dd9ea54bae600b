"""The tutorial's program runs as the page shows it, its agent learns, and Ctrl-C ends it in good order."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from support.processes import Children

CHECKOUT = Path(__file__).parents[2]
AGENT = CHECKOUT / "scripts" / "tutorial_agent.py"


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "least"), [(200, 1.0), (12_000, 200.0)], ids=["a short run ends in order", "a whole run learns"])
def test_the_tutorials_agent(children: Children, updates: int, least: float) -> None:
    child = children.start([sys.executable, "-W", "error", str(AGENT), str(updates)], name="tutorial", deadline_s=110.0)
    assert child.wait() == 0, child.output
    reached = re.search(r"mean return of 20 episodes: (\d+)", child.output)
    assert reached is not None
    assert float(reached[1]) >= least


@pytest.mark.slow
def test_ctrl_c_ends_the_tutorials_agent_with_one_line(children: Children) -> None:
    child = children.start([sys.executable, str(AGENT)], name="tutorial", deadline_s=60.0)
    child.wait_for("update 0 of")
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does
    assert child.wait() == 130
    assert "interrupted: the server and the collector have ended" in child.output
    assert "Traceback" not in child.output


def test_the_tutorials_collector_imports_no_torch(children: Children) -> None:
    pytest.importorskip("gymnasium", reason="the extra `gymnasium` is not installed")
    program = f"import runpy, sys; runpy.run_path({str(AGENT)!r}, run_name='__mp_main__'); sys.exit('torch' in sys.modules)"
    assert children.start([sys.executable, "-c", program], name="collector").wait() == 0


def test_the_page_shows_the_programs_own_lines() -> None:
    shown = re.findall(r"^```python\n(.*?)^```$", (CHECKOUT / "docs/tutorial.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert len(shown) == 3
    assert [lines for lines in shown if lines not in AGENT.read_text("utf-8")] == []
