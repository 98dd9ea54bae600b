"""Checks of the installed packages against what this package asks for; nothing is imported to learn a version."""

from __future__ import annotations

import platform
import re
from importlib import metadata

from replay_server.doctor.finding import Finding, failure, ok, skipped, warning
from replay_server.doctor.scene import Scene

_PROJECT = "replay-server"
_NEEDED = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?P<limits>[<>=!~0-9., ]*)(?:;(?P<when>.*))?")
_LIMIT = re.compile(r"(>=|<=|==|<|>)\s*([0-9.]+)")
_CUDA, _TORCH = "cuda-bindings", "torch"


def packages(scene: Scene) -> Finding:
    """numpy, pyzmq, msgpack, torch, and for a GPU the CUDA bindings, in versions that fit."""
    try:
        needed = metadata.requires(_PROJECT) or []
    except metadata.PackageNotFoundError:
        return skipped(f"{_PROJECT} is not installed as a package", "pip install . in its checkout")
    versions, wrong, missing = [f"python {platform.python_version()}"], [], []
    for name, limits in _of_this_run(needed, scene):
        version = _version_of(name)
        if version is None:
            missing.append(f"{name}{limits}")
            continue
        versions.append(f"{name} {version}")
        if not fits(version, limits):
            wrong.append(f"{name}{limits}")
    found = ", ".join(versions)
    if missing == [next((m for m in missing if m.startswith(_TORCH)), "")]:
        return warning(f"{found}; no torch: server and collectors run without it, learners don't", f"pip install '{missing[0]}'")
    if missing or wrong:
        wanted = " ".join(f"'{requirement}'" for requirement in missing + wrong)
        return failure(f"{found}; missing or unfit: {', '.join(missing + wrong)}", f"pip install {wanted}")
    return ok(found)


def torch_build(scene: Scene) -> Finding:
    """A learner on a GPU needs a torch with CUDA."""
    version = _version_of(_TORCH)
    if version is None:
        return skipped("torch is not installed")
    if not scene.gpus.devices:
        return ok(f"torch {version}; no GPU is asked for or visible")
    if version.endswith("+cpu"):
        remedy = "install torch's CUDA build where learners run; or Learner.connect(device='cpu') with --storage host"
        return warning(f"torch {version} has no CUDA, and a GPU is there", remedy)
    return ok(f"torch {version}")


def fits(version: str, limits: str) -> bool:
    """Whether a version lies within limits like ``>=13.0.3,<14``; what follows the numbers (``+cpu``, ``rc1``) is not looked at."""
    have = _numbers(version)
    for operator, text in _LIMIT.findall(limits):
        want = _numbers(text)
        size = max(len(have), len(want))
        pair = [(*side, *(0,) * (size - len(side))) for side in (have, want)]
        is_met = {
            ">=": pair[0] >= pair[1],
            "<=": pair[0] <= pair[1],
            "==": pair[0] == pair[1],
            "<": pair[0] < pair[1],
            ">": pair[0] > pair[1],
        }
        if not is_met[operator]:
            return False
    return True


def _of_this_run(needed: list[str], scene: Scene) -> list[tuple[str, str]]:
    """(name, limits) of what every run needs, and of the extra ``cuda`` where a GPU is asked for by name or answered."""
    wants_cuda = scene.device.startswith("cuda") or bool(scene.gpus.devices)
    found = []
    for text in needed:
        match = _NEEDED.fullmatch(text.replace("(", "").replace(")", ""))
        if match is None:
            continue
        is_cuda = match["name"] == _CUDA
        if (is_cuda and wants_cuda) or (not is_cuda and "extra" not in (match["when"] or "")):
            found.append((match["name"], match["limits"].strip()))
    return found


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    leading = re.match(r"[0-9.]+", version)
    return tuple(int(part) for part in (leading[0] if leading else "").split(".") if part)
