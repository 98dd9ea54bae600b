"""The scripts that show adapters run as they stand, each with the library it is for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from support.processes import Children

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "library", "told"),
    [
        (["example_tensordict.py"], "tensordict", "update 200: TD error 0."),
        (["example_dlpack.py"], "numpy", "numpy on cpu: 50 batches"),
        (["example_dlpack.py", "--library", "jax"], "jax", "jax on cpu: 50 batches"),
        (["example_gymnasium.py"], "gymnasium", "400 rows of 408 steps"),
    ],
)
def test_an_example_runs_as_it_stands(children: Children, command: list[str], library: str, told: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    example = children.start([sys.executable, str(SCRIPTS / command[0]), *command[1:]], deadline_s=60.0)
    assert example.wait() == 0
    assert told in example.output
