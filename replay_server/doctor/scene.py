"""What the checks look at: the server that is meant, the device, the environment, and the GPUs as CUDA and as the driver's tool tell."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ReplayError

from replay_server.doctor.child import output_of, python, started

CUDA_CHILD = "replay_server.doctor.cuda_child"
_TOOL_FIELDS = "uuid,driver_version,mig.mode.current,compute_mode"


@dataclass(frozen=True)
class Gpus:
    """The GPUs that CUDA shows to a child of this process, in its order; or ``why_none``."""

    devices: tuple[tuple[str, str], ...] = ()
    driver: int = 0
    runtime: int = 0
    why_none: str = ""


@dataclass(frozen=True)
class ToolGpu:
    """A GPU as nvidia-smi lists it, whether CUDA shows it or not."""

    uuid: str
    driver: str
    mig: str
    compute_mode: str


@dataclass(frozen=True)
class Scene:
    """``limit_s`` is how long each child of a check may take; ``environment`` is what the checks read, children get this process's own."""

    endpoints: Endpoints
    device: str = "auto"
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    proc: Path = Path("/proc")
    limit_s: float = 20.0

    @property
    def wants_gpu(self) -> bool:
        return self.device == "auto" or self.device.startswith("cuda")

    @property
    def ordinal(self) -> int:
        return int(self.device.partition(":")[2] or 0)

    @cached_property
    def gpus(self) -> Gpus:
        """Asked once; a child does it, so that no context stays and nothing can hang here."""
        if not self.wants_gpu:
            return Gpus(why_none=f"--device {self.device} needs no GPU")
        try:
            with started(python(CUDA_CHILD, "devices"), self.limit_s) as child:
                answer: dict[str, Any] = child.answer()
        except ReplayError as error:
            return Gpus(why_none=str(error))
        devices = tuple((str(device["uuid"]), str(device["name"])) for device in answer["devices"])
        return Gpus(devices, int(answer["driver"]), int(answer["runtime"]))

    @cached_property
    def tool_gpus(self) -> tuple[ToolGpu, ...] | str:
        """What nvidia-smi lists, or why it can't be asked."""
        try:
            text = output_of(["nvidia-smi", f"--query-gpu={_TOOL_FIELDS}", "--format=csv,noheader"], self.limit_s)
        except ReplayError as error:
            return str(error)
        rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
        return tuple(ToolGpu(*row) for row in rows if len(row) == 4)

    def read(self, path: str) -> str:
        """A file below /proc; empty where there is none."""
        try:
            return (self.proc / path).read_text("utf-8", errors="replace")
        except OSError:
            return ""


def pid_behind(path: Path) -> int | None:
    """The process that listens at a socket: None when nobody does, 0 when it is in another PID namespace and has no pid here."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            return 0  # its backlog is full: it is there, and busy
        except OSError:
            return None
        pid, _, _ = struct.unpack("iII", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)
