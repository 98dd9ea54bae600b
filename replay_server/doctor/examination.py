"""All checks in their order, each within its time, and the report of what they found."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from replay_server_protocol.errors import ReplayError

from replay_server import __version__
from replay_server.doctor import gpu, leftovers, memory, packages, processes
from replay_server.doctor.finding import Finding, Verdict, failure
from replay_server.doctor.scene import Scene

REPORT_VERSION = 1
_CHILDREN_OF_A_CHECK = 3
"""As many as one check starts, one after the other or side by side."""

Check = Callable[[Scene], Finding]

CHECKS: dict[str, Check] = {
    "packages": packages.packages,
    "torch": packages.torch_build,
    "driver": gpu.driver,
    "visible GPUs": gpu.visibility,
    "CUDA IPC": gpu.ipc,
    "MIG": gpu.mig,
    "platform": gpu.platform,
    "CUDA MPS": gpu.mps,
    "torch allocator": gpu.allocator,
    "shared clock": processes.clock,
    "deaths": processes.deaths,
    "PID namespace": processes.pid_namespace,
    "shared memory": memory.shared_memory,
    "allocation": memory.allocation,
    "host memory": memory.host_memory,
    "locked memory": memory.locked_memory,
    "open files": processes.descriptors,
    "processors": processes.processors,
    "run directory": leftovers.run_directory,
    "dead servers": leftovers.leftovers,
    "dead segments": leftovers.segments,
    "ring holders": leftovers.holders,
    "logout": leftovers.logout,
}


def examine(scene: Scene, checks: Mapping[str, Check] | None = None) -> dict[str, Finding]:
    """Runs every check. None can hold up the rest: one that is not done in its time is a failure, and so is one that breaks."""
    return {name: _within(check, scene) for name, check in (CHECKS if checks is None else checks).items()}


def has_failures(findings: Mapping[str, Finding]) -> bool:
    return any(finding.verdict is Verdict.FAILURE for finding in findings.values())


def as_json(scene: Scene, findings: Mapping[str, Finding]) -> dict[str, object]:
    """The report for programs; ``report_version`` rises when a key changes its meaning or goes."""
    return {
        "report_version": REPORT_VERSION,
        "replay_server": __version__,
        "name": scene.endpoints.name,
        "run_dir": str(scene.endpoints.run_dir),
        "device": scene.device,
        "has_failures": has_failures(findings),
        "findings": [
            {"name": name, "verdict": finding.verdict.value, "found": finding.found, "remedy": finding.remedy}
            for name, finding in findings.items()
        ],
    }


def as_lines(findings: Mapping[str, Finding]) -> list[str]:
    """The report for people: verdict, name, what was found, and below it what to do."""
    width = max(map(len, findings), default=0)
    lines = []
    for name, finding in findings.items():
        lines.append(f"{finding.verdict.value:<8} {name:<{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<{width}}  to do: {finding.remedy}")
    counts = Counter(finding.verdict for finding in findings.values())
    lines.append(", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict))
    return lines


def _within(check: Check, scene: Scene) -> Finding:
    """Runs a check in a thread of its own: its children are killed in time, but a file system that hangs keeps whoever asks it."""
    found: list[Finding] = []

    def look() -> None:
        try:
            found.append(check(scene))
        except (ReplayError, OSError, ValueError, KeyError, TypeError) as error:
            found.append(failure(f"the check could not be made: {error or type(error).__name__}", "see the message; all else was checked"))

    thread = threading.Thread(target=look, name="doctor", daemon=True)
    limit_s = _CHILDREN_OF_A_CHECK * scene.limit_s
    thread.start()
    thread.join(limit_s)
    if not found:
        return failure(f"not done within {limit_s:g} s", "see whether /dev/shm, the run directory or the GPU's driver hangs")
    return found[0]
