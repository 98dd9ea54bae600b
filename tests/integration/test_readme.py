"""Every Python example of the pages for users runs as it stands, against a server that a script spawned."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import Children
from support.rarely import rarely

from replay_server import ReplayServer

CHECKOUT = Path(__file__).parents[2]
HOW_TO = ("cuda-graphs", "lock-step", "many-collectors", "offline-to-online")
PAGES = ("README.md", "docs/rows.md", *(f"docs/how-to/{page}.md" for page in HOW_TO))
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOGETHER = ("collect.py", "learn.py")
LONGEST_S = 60.0


def examples() -> dict[str, str]:
    """The Python blocks by the file names in their first lines."""
    found: dict[str, str] = {}
    for page in PAGES:
        for source in FENCE.findall((CHECKOUT / page).read_text("utf-8")):
            name = source.partition("\n")[0].removeprefix("# ")
            assert name.endswith(".py"), f"{page}: a block starts with {name!r}, not with a file name"
            assert name not in found, f"{page}: two blocks are {name}"
            found[name] = source
    return found


EXAMPLES = examples()
ALONE = [name for name in EXAMPLES if name not in TOGETHER]


@pytest.fixture
def spawned(children: Children) -> Iterator[ReplayServer]:
    """Its name and run directory are in the environment, where the examples look for them. Ends before the leak check of ``children``."""
    with ReplayServer.spawn(capacity=100_000, device="cpu") as server:
        yield server


def run(children: Children, folder: Path, *names: str) -> list[str]:
    """What the examples, run at once and in this order of starting, have written; each must end with 0."""
    started = []
    for name in names:
        (folder / name).write_text(EXAMPLES[name], "utf-8")
        started.append(children.start([sys.executable, "-W", "error", str(folder / name)], name=name, deadline_s=LONGEST_S))
    for child in started:
        assert child.wait() == 0, f"{child.output}"
    return [child.output for child in started]


@pytest.mark.parametrize(
    "names", [pytest.param(TOGETHER, id="collector first", marks=pytest.mark.slow), pytest.param(TOGETHER[::-1], id="learner first")]
)
def test_the_quick_start_collects_and_learns_in_any_order(
    spawned: ReplayServer, children: Children, tmp_path: Path, names: tuple[str, str]
) -> None:
    said = dict(zip(names, run(children, tmp_path, *names), strict=True))
    assert re.search(r"committed up to seq \d{4}", said["collect.py"])
    assert re.search(r"loss \d+\.\d+ LearnerStatistics\(batches=500, rows=128000,", said["learn.py"])
    counters = spawned.status()["counters"]
    assert counters["rows_committed"] == counters["rows_published"] == int(said["collect.py"].split()[-1])


def test_the_quick_start_is_short() -> None:
    assert all(len(EXAMPLES[name].splitlines()) <= 20 for name in TOGETHER)


@pytest.mark.parametrize("name", [*ALONE[::2], *rarely(*ALONE[1::2])])
def test_an_example_runs_as_it_stands(spawned: ReplayServer, children: Children, tmp_path: Path, name: str) -> None:
    run(children, tmp_path, name)
