"""Many fault schedules at a time: stages in processes of their own, each with a /dev/shm of its own where this user may have one."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.processes import Child, Children

_IMPORT_S = 60.0
_A_SEED_S = 30.0
_READ_EVERY_S = 0.3
_OWN_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "stage")


def outcomes(children: Children, seeds: Sequence[int], stages: int, device: str = "cpu") -> list[dict[str, Any]]:
    """What became of the seeds (fault_stage.Outcome as JSON), in their order, played on ``stages`` stages."""
    parts = [part for part in (list(seeds[stage::stages]) for stage in range(stages)) if part]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    command = [*_own_shm(), sys.executable, "-u", "-c", "from support.fault_stage import main; main()", device]
    running = [
        children.start([*command, *map(str, part)], name="stage", deadline_s=_IMPORT_S + _A_SEED_S * len(part), PYTHONPATH=path)
        for part in parts
    ]
    while sum(_is_busy(child) for child in running):  # each is read: a full pipe would hold its stage
        time.sleep(_READ_EVERY_S)
    found = {}
    for child in running:
        for line in child.output.splitlines():
            if line.startswith('{"seed"'):
                outcome = json.loads(line)
                found[outcome["seed"]] = outcome
    nothing = {"broken": [f"the stage ended before it: {running[0].output[-2000:]}"], "lines": [], "happened": [], "logs": {}}
    return [found.get(seed) or {"seed": seed, **nothing} for seed in seeds]


def told(outcome: dict[str, Any]) -> str:
    """All that is needed to understand a broken promise and to see it again."""
    lines = [*outcome["broken"], "", *outcome["lines"], "", "what happened:", *outcome["happened"], ""]
    lines += [f"{name}:\n{text}" for name, text in outcome["logs"].items() if text]
    return "\n".join([*lines, f"again: pytest tests/fault/test_schedules.py --seed {outcome['seed']}"])


def _is_busy(child: Child) -> bool:
    """Reads what it has written; ends it at its deadline."""
    if child.is_alive() and not child.is_overdue:
        return child.output is not None
    child.wait()
    return False


@functools.cache
def _own_shm() -> tuple[str, ...]:
    tried = subprocess.run([*_OWN_SHM, "true"], capture_output=True, timeout=20, check=False)
    return _OWN_SHM if tried.returncode == 0 else ()
