"""Checks of host memory: /dev/shm, what may be locked, and what a control group leaves."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path

from replay_server_protocol.errors import ReplayError
from replay_server_protocol.segment import segment_dir

from replay_server import cgroup
from replay_server.budget import HOST_RESERVE_BYTES, free_host_bytes
from replay_server.doctor.child import python, started
from replay_server.doctor.finding import Finding, failure, ok, skipped, warning
from replay_server.doctor.scene import CUDA_CHILD, Scene

_SMALL_BYTES = 1 << 30
_PIN_BYTES = 16 << 20
_ENLARGE = "mount -o remount,size=16G {folder} (as root); docker: --shm-size=16g or --ipc=host; Kubernetes: an emptyDir of medium Memory"


def shared_memory(scene: Scene) -> Finding:
    """Room for slots, mailboxes and host rings."""
    folder = segment_dir()
    room = os.statvfs(folder)
    total_bytes, free_bytes = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    found = f"{folder} has {total_bytes:,} bytes, {free_bytes:,} free"
    remedy = _ENLARGE.format(folder=folder)
    if free_bytes <= HOST_RESERVE_BYTES:
        return failure(f"{found}; the server leaves {HOST_RESERVE_BYTES:,} free, so that no slot fits", remedy)
    kind = _kind_of(folder, scene.read("mounts"))
    if kind not in ("tmpfs", "ramfs", ""):
        return warning(f"{found}; it is a {kind}, not memory", f"mount a tmpfs there; {remedy}")
    if free_bytes < _SMALL_BYTES:
        return warning(f"{found}: enough for slots, little for a ring in host memory", remedy)
    return ok(found)


def allocation(scene: Scene) -> Finding:
    """Pages are taken at once (posix_fallocate): a full file system then is an error, not a process killed by SIGBUS."""
    folder = segment_dir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 20)
            taken = os.fstat(file.fileno()).st_blocks * 512
    except OSError as error:
        return failure(f"posix_fallocate in {folder}: {error.strerror}", _ENLARGE.format(folder=folder))
    if taken < 1 << 20:
        return warning(f"posix_fallocate in {folder} took {taken:,} of {1 << 20:,} bytes", "mount a tmpfs there")
    return ok(f"posix_fallocate works in {folder}")


def host_memory(scene: Scene) -> Finding:
    """The least of what the system, the control group and /dev/shm leave."""
    free_bytes, in_group = free_host_bytes(), cgroup.free_memory_bytes()
    group = "no limit of a control group" if in_group is None else f"the control group leaves {in_group:,}"
    found = f"a new segment may take {free_bytes:,} bytes; {group}"
    if free_bytes <= HOST_RESERVE_BYTES:
        return failure(found, "free memory, or raise the container's limit (docker: --memory)")
    if free_bytes < _SMALL_BYTES:
        return warning(found, "give the container or service more memory for a ring in host memory (docker: --memory, systemd: MemoryMax=)")
    return ok(found)


def locked_memory(scene: Scene) -> Finding:
    """Slots are page-locked for the GPU; where that fails, copies are slower, not wrong."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft:,} bytes"
    if not scene.gpus.devices:
        return ok(f"{limit}; a ring in host memory locks nothing")
    remedy = "ulimit -l unlimited; docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity"
    try:
        with started(python(CUDA_CHILD, "pin", str(_PIN_BYTES)), scene.limit_s) as child:
            why_not = child.answer()["why_not"]
    except ReplayError as error:
        return skipped(f"{limit}; locking {_PIN_BYTES:,} bytes could not be tried: {error}")
    if why_not is not None:
        return warning(f"{limit}; {why_not}: slots are copied at a third of the speed", remedy)
    return ok(f"{limit}; {_PIN_BYTES:,} bytes of shared memory could be locked")


def _kind_of(folder: Path, mounts: str) -> str:
    """File system type of the innermost mount that holds ``folder``; empty where /proc tells nothing."""
    lines = [line.split() for line in mounts.splitlines()]
    holding = [fields for fields in lines if len(fields) > 2 and folder.resolve().is_relative_to(fields[1])]
    return max(holding, key=lambda fields: len(fields[1]))[2] if holding else ""
