"""Checks of the GPU: driver, which GPUs are visible, sharing between processes, and what stands in its way."""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path

from replay_server_protocol.errors import ReplayError

from replay_server.doctor.child import python, started
from replay_server.doctor.finding import Finding, failure, ok, skipped, warning
from replay_server.doctor.scene import CUDA_CHILD, Scene

_ON_CPU = "serve with --device cpu, or make the GPU visible"
_NO_GPU = "no GPU answers (see driver)"
_MPS_FOLDER = "/tmp/nvidia-mps"


def driver(scene: Scene) -> Finding:
    """A driver and a GPU answer, through the CUDA bindings."""
    gpus = scene.gpus
    if gpus.devices:
        names = ", ".join(f"cuda:{n} {name} (GPU-{uuid})" for n, (uuid, name) in enumerate(gpus.devices))
        found = f"{_driver_version(scene)}, CUDA {_version(gpus.driver)}, runtime {_version(gpus.runtime)}; {names}"
        if scene.ordinal >= len(gpus.devices):
            return failure(found, f"--device {scene.device} is none of them; nvidia-smi -L lists what there is")
        return ok(found)
    if scene.wants_gpu and scene.device != "auto":
        return failure(gpus.why_none, _ON_CPU)
    return skipped(gpus.why_none)


def visibility(scene: Scene) -> Finding:
    """The GPUs that CUDA shows are those the machine has, or those that CUDA_VISIBLE_DEVICES chose."""
    chosen = scene.environment.get("CUDA_VISIBLE_DEVICES")
    said = "CUDA_VISIBLE_DEVICES is not set" if chosen is None else f"CUDA_VISIBLE_DEVICES={chosen!r}"
    listed = scene.tool_gpus
    if isinstance(listed, str) or not listed:
        if scene.gpus.devices:
            return ok(f"{len(scene.gpus.devices)} visible, {said}; nvidia-smi tells nothing ({listed or 'no GPU'})")
        return skipped(f"neither CUDA nor nvidia-smi shows a GPU; {said}")
    if not scene.wants_gpu:
        return skipped(scene.gpus.why_none)
    visible = {uuid for uuid, _ in scene.gpus.devices}
    if not visible:
        return failure(f"nvidia-smi lists {len(listed)}, CUDA shows none; {said}", "correct or unset CUDA_VISIBLE_DEVICES; see driver")
    strangers = visible - {gpu.uuid.removeprefix("GPU-") for gpu in listed}
    if strangers and "MIG" not in (chosen or ""):
        return warning(f"CUDA shows {', '.join(sorted(strangers))}, which nvidia-smi does not list", "run both in the same container")
    return ok(f"{len(visible)} of {len(listed)} GPUs, {said}; server and learners find each other's GPU by its UUID, not by its number")


def ipc(scene: Scene) -> Finding:
    """One process allocates and writes; another one maps that memory and reads the same bytes."""
    if not scene.gpus.devices:
        return skipped(_NO_GPU)
    remedy = (
        "serve with --storage host: it needs no CUDA IPC (containers: one PID namespace or different pids, all GPUs in both, no MIG slices)"
    )
    try:
        with started(python(CUDA_CHILD, "share", str(scene.ordinal)), scene.limit_s) as sharer:
            shared = sharer.answer()
            with started(python(CUDA_CHILD, "read", shared["uuid"], shared["handle"]), scene.limit_s) as reader:
                found = reader.answer()
    except ReplayError as error:
        return failure(f"between two processes on cuda:{scene.ordinal}: {error}", remedy)
    if found["pattern"] != shared["pattern"]:
        return failure(f"the second process mapped the memory of {shared['name']} and read other bytes than the first one wrote", remedy)
    return ok(f"a second process read what the first one wrote on {shared['name']}")


def allocator(scene: Scene) -> Finding:
    """Torch's allocator settings, which matter to torch's own sharing of tensors and not to the ring."""
    name = next((name for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if scene.environment.get(name)), None)
    if name is None:
        return ok("no settings of torch's allocator")
    setting = f"{name}={scene.environment[name]}"
    if re.search(r"expandable_segments\s*:\s*true|cudaMallocAsync", setting, re.IGNORECASE):
        return ok(f"{setting}: the ring is memory of its own and not touched by it; only sharing torch tensors between processes would be")
    return ok(setting)


def mig(scene: Scene) -> Finding:
    """Slices of a GPU (MIG), and compute modes that let one process in."""
    if not scene.gpus.devices:
        return skipped(_NO_GPU)
    listed = scene.tool_gpus
    if isinstance(listed, str):
        return skipped(f"nvidia-smi can't be asked: {listed}")
    uuids = {f"GPU-{uuid}" for uuid, _ in scene.gpus.devices}
    modes = [gpu.compute_mode for gpu in listed if gpu.uuid in uuids]
    if any(mode.lower().startswith(("exclusive", "prohibited")) for mode in modes):
        return failure(f"compute mode {', '.join(modes)}: server and learner can't both use the GPU", "nvidia-smi -c DEFAULT (as root)")
    if any(gpu.mig == "Enabled" for gpu in listed) or "MIG-" in scene.environment.get("CUDA_VISIBLE_DEVICES", ""):
        remedy = "give server and learners the same MIG slice (its UUID in CUDA_VISIBLE_DEVICES), or serve with --storage host"
        return warning("MIG is enabled: memory can't be shared between two slices of a GPU", remedy)
    return ok("no MIG, compute mode default")


def platform(scene: Scene) -> Finding:
    """Systems on which CUDA IPC is missing or not to be trusted."""
    remedy = "serve with --storage host (or --device cpu); each learner's mapping is proved when it attaches, so that nothing wrong is read"
    if "microsoft" in scene.read("version").lower():
        return warning("WSL: sharing GPU memory between processes is limited there, and so is pinned memory", remedy)
    if Path("/etc/nv_tegra_release").exists():
        return warning("Tegra: it has no CUDA IPC of memory", remedy)
    return ok("Linux, no WSL and no Tegra")


def mps(scene: Scene) -> Finding:
    """Whether a CUDA MPS daemon runs, and what that means here."""
    folder = Path(scene.environment.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_FOLDER)
    if not folder.is_dir():
        return ok("none: kernels of two processes take turns of about 1 ms; the server only copies, which overlaps")
    if not _answers(folder):
        return warning(
            f"{folder} is left of a CUDA MPS daemon that does not answer: CUDA may fail to start", f"start the daemon, or rm -r {folder}"
        )
    owner = folder.stat().st_uid
    found = f"a CUDA MPS daemon answers in {folder}: kernels overlap, and a fault of one process ends all on that GPU"
    if owner not in (0, os.getuid()):
        return warning(f"{found}; it belongs to uid {owner}", "run daemon, server and learners as one user")
    return ok(found)


def _answers(folder: Path) -> bool:
    """False when nobody holds the daemon's end of its control channel, a socket or a FIFO."""
    control = folder / "control"
    try:
        if control.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                probe.connect(os.fspath(control))
        else:
            os.close(os.open(control, os.O_WRONLY | os.O_NONBLOCK))  # a FIFO opens for writing only if somebody reads it
    except OSError as error:
        return error.errno not in (errno.ECONNREFUSED, errno.ENOENT, errno.ENXIO)
    return True


def _driver_version(scene: Scene) -> str:
    if not isinstance(scene.tool_gpus, str) and scene.tool_gpus:
        return f"driver {scene.tool_gpus[0].driver}"
    found = re.search(r"Kernel Module\D*([\d.]+)", scene.read("driver/nvidia/version"))
    return f"driver {found[1]}" if found else "driver of unknown version"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
