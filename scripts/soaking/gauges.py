"""One look at everything that could leak or slow down: memory, descriptors, threads, segments, waits, rates, and the sums of rows."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ServerGone
from replay_server_protocol.segment import segment_dir, segment_name
from soaking.crew import Crew, Member
from soaking.telling import News

from replay_server import ReplayServer

_MB = 1e6
_ANSWER_WITHIN_S = 30.0
KINDS = ("write", "sample")


class Gauges:
    """``looks`` is a table: a list of equal length for each gauge. ``faults`` are what can't be in a sound server."""

    def __init__(self, server: ReplayServer, crew: Crew, has_gpu: bool) -> None:
        self.looks: dict[str, list[float]] = defaultdict(list)
        self.faults: list[str] = []
        self.totals: dict[str, int] = defaultdict(int)
        self.last_report: dict[str, Any] = server.status(timeout=_ANSWER_WITHIN_S)
        self.is_server_lost = False
        self._server = server
        self._crew = crew
        self._has_gpu = has_gpu
        self._prefix = _segment_prefix(server)
        self._waits: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._rows = dict.fromkeys(KINDS, 0)
        self.take(crew.news())
        self._flow(1.0)  # what was told before the first look is no part of its rates
        self._begin_s = self._looked_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin_s

    def take(self, found: list[tuple[Member, News]]) -> None:
        """Adds what clients told; their faults become ours."""
        for member, news in found:
            self._waits[member.kind] += news.waits_s
            self._rows[member.kind] += news.rows
            self.faults += news.faults
            for what in ("rows", "calls", "timeouts", "sessions", "letters"):
                self.totals[f"{what} ({member.kind})"] += getattr(news, what)

    def look(self) -> None:
        """A server that doesn't answer is a fault, and lost."""
        begin_s = time.monotonic()
        try:
            report = self.last_report = self._server.status(timeout=_ANSWER_WITHIN_S)
        except ServerGone as gone:
            self.is_server_lost = True
            self.faults.append(str(gone))
            return
        now_s = time.monotonic()
        look = {
            "t": now_s - self._begin_s,
            "status answer ms": (now_s - begin_s) * 1e3,
            "sessions": len(report["collectors"]) + len(report["learners"]),
            **self._processes(),
            **self._segments(),
            **self._flow(now_s - self._looked_s),
        }
        if self._has_gpu:
            look["device memory MB"] = device_memory_mb(report["device"]["uuid"])
        self._looked_s = now_s
        self.faults += faults_of(report)
        for name, value in look.items():
            self.looks[name].append(value)

    def segments_left(self) -> list[str]:
        return sorted(path.name for path in segment_dir().iterdir() if path.name.startswith(self._prefix))

    def _processes(self) -> dict[str, float]:
        found = {f"server {name}": value for name, value in _process(self._server.pid).items()}
        for member in self._crew.residents:
            found |= {f"{member.who} {name}": value for name, value in _process(member.pid).items()}
        return found

    def _segments(self) -> dict[str, float]:
        """Names in /dev/shm, and what the server still maps of those that have lost theirs."""
        maps = Path(f"/proc/{self._server.pid}/maps").read_text("utf-8").splitlines()
        return {"segments named": len(self.segments_left()), "segments mapped": sum(self._prefix in line for line in maps)}

    def _flow(self, over_s: float) -> dict[str, float]:
        """Rates and waits since the last look."""
        found: dict[str, float] = {}
        for kind in KINDS:
            waits, self._waits[kind] = np.asarray(self._waits[kind]) * 1e3, []
            for percent in (50, 99):
                found[f"{kind} p{percent} ms"] = float(np.percentile(waits, percent)) if len(waits) else math.nan
            found[f"{kind} rows/s"] = self._rows[kind] / over_s
            self._rows[kind] = 0
        return found


def faults_of(report: dict[str, Any]) -> list[str]:
    """Sums that don't add up, and messages that no client of ours sends."""
    counters, ring = report["counters"], report["ring"]
    accounted = sum(counters[f"rows_{name}"] for name in ("committed", "rejected", "lost", "in_flight"))
    faults = []
    if counters["rows_published"] != accounted:
        faults.append(f"rows don't add up: {counters}")
    if ring is not None and counters["rows_committed"] != ring["committed"]:
        faults.append(f"committed rows are not the ring's: {counters['rows_committed']} and {ring['committed']}")
    if counters["bad_messages"]:
        faults.append(f"{counters['bad_messages']} bad messages")
    if counters["rows_rejected"] or counters["rows_lost"]:
        faults.append(f"{counters['rows_rejected']} rows rejected, {counters['rows_lost']} lost")
    return faults


def device_memory_mb(uuid: str) -> float:
    """Used memory of the GPU of that UUID, by whoever uses it; numbers of GPUs mean others where CUDA_VISIBLE_DEVICES hides some."""
    command = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return used_mb(found.stdout, uuid)


def used_mb(table: str, uuid: str) -> float:
    """The figure of ``uuid``, with or without its GPU-, in nvidia-smi's lines ``GPU-uuid, MiB``; NaN if it isn't there."""
    for line in table.splitlines():
        name, _, mebibytes = line.partition(",")
        if name.strip().removeprefix("GPU-") == uuid.removeprefix("GPU-"):
            with contextlib.suppress(ValueError):
                return float(mebibytes) * 1.048576
    return math.nan


def _process(pid: int) -> dict[str, float]:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return {"RSS MB": _own_bytes(process) / _MB, "fds": process.num_fds(), "threads": process.num_threads()}
    except psutil.Error:
        return {"RSS MB": math.nan, "fds": math.nan, "threads": math.nan}


def _own_bytes(process: psutil.Process) -> float:
    """RSS without pages of files and shared memory: those of the ring come in one by one as they are touched."""
    found = process.memory_info()
    return float(found.rss - found.shared)


def _segment_prefix(server: ReplayServer) -> str:
    record = json.loads(Endpoints.resolve(server.name, server.run_dir).lock_path.read_text("utf-8"))
    return segment_name(record["run_id"], "")
