"""Checks of what processes see of each other: one clock, deaths, pids, descriptors, processors."""

from __future__ import annotations

import os
import resource
import select
import time
from pathlib import Path

from replay_server_protocol.process import spin_s

from replay_server import cgroup
from replay_server.config import ServerConfig
from replay_server.descriptors import OF_A_CLIENT, Room
from replay_server.doctor.child import python, started
from replay_server.doctor.finding import Finding, failure, ok, warning
from replay_server.doctor.scene import Scene, pid_behind

PROCESS_CHILD = "replay_server.doctor.process_child"
_DEATH_SEEN_WITHIN_S = 2.0
_MOST_WANTED = 65_536
_FIRST_PID_NAMESPACE, _FIRST_TIME_NAMESPACE = 0xEFFFFFFC, 0xEFFFFFFA


def clock(scene: Scene) -> Finding:
    """A child reads the same CLOCK_MONOTONIC: a lease's deadline is a moment of the server's clock that the learner reads on its own."""
    remedy = "start server, collectors and learners in one time namespace (without unshare --time), on one kernel"
    with started(python(PROCESS_CHILD), scene.limit_s) as child:
        child.ask()
        child.answer()  # it has started: what follows is timed without that
        before_ns = time.monotonic_ns()
        child.ask()
        answer = child.answer()
        after_ns = time.monotonic_ns()
    there_ns = int(answer["monotonic_ns"])
    if not before_ns <= there_ns <= after_ns:
        return failure(f"a child reads {there_ns} ns, this process {before_ns} to {after_ns}", remedy)
    own, behind = _namespace("self", "time"), _server_pid(scene)
    if answer["time_namespace"] != own:
        return failure("a child lives in another time namespace than this process", remedy)
    theirs = _namespace(str(behind), "time") if behind else own
    if theirs not in (own, 0):
        return failure(f"the server (pid {behind}) lives in another time namespace than this shell", remedy)
    if own not in (0, _FIRST_TIME_NAMESPACE):
        offsets = "; ".join(" ".join(line.split()) for line in scene.read("self/timens_offsets").splitlines())
        return warning(f"this shell lives in a time namespace of its own ({offsets})", remedy)
    return ok(f"a child read the same clock within {(after_ns - before_ns) / 1e6:.1f} ms")


def deaths(scene: Scene) -> Finding:
    """A pidfd tells the end of a process at once."""
    remedy = "Linux 5.3 or newer, and a seccomp profile that allows pidfd_open; until then a dead client is noticed by its connection only"
    with started(python(PROCESS_CHILD), scene.limit_s) as child:
        try:
            pidfd = os.pidfd_open(child.pid)
        except OSError as error:
            return warning(f"pidfd_open: {error.strerror}", remedy)
        try:
            began_s = time.monotonic()
            child.close()
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(_DEATH_SEEN_WITHIN_S * 1000):
                return warning(f"a child's death was not told within {_DEATH_SEEN_WITHIN_S:g} s", remedy)
        finally:
            os.close(pidfd)
    return ok(f"a child's death was seen after {(time.monotonic() - began_s) * 1000:.1f} ms")


def pid_namespace(scene: Scene) -> Finding:
    """Server and clients see each other's pids."""
    remedy = "start them in one PID namespace (docker: --pid=host or --pid=container:NAME); CUDA IPC fails between two processes of one pid"
    behind = _server_pid(scene)
    if behind == 0:
        return warning("the server lives in another PID namespace: its clients' deaths are noticed by their connections only", remedy)
    own = _namespace("self", "pid")
    if own not in (0, _FIRST_PID_NAMESPACE):
        return warning(
            "this is a PID namespace of its own (a container?); clients from others are watched by their connections only", remedy
        )
    return ok("the machine's own" if behind is None else f"the machine's own, and the server (pid {behind}) is seen from here")


def descriptors(scene: Scene) -> Finding:
    """Open files: each client takes a few in the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_WANTED if hard == resource.RLIM_INFINITY else hard
    clients = max(0, (limit - 32 - Room.of_limit(limit).reserve) // OF_A_CLIENT)
    found = f"limit {soft:,}, which a server raises to {limit:,}: about {clients:,} clients"
    remedy = f"ulimit -Hn {_MOST_WANTED} (as root); docker: --ulimit nofile={_MOST_WANTED}; systemd: LimitNOFILE={_MOST_WANTED}"
    defaults = ServerConfig()
    if clients < 2:
        return failure(found, remedy)
    if clients < defaults.max_collectors + defaults.max_learners:
        return warning(found, remedy)
    return ok(found)


def processors(scene: Scene) -> Finding:
    """The server's loop, the learner and the collectors each keep a core busy."""
    cores, quota = len(os.sched_getaffinity(0)), cgroup.processors()
    usable = cores if quota is None else min(cores, quota)
    found = f"{cores} processors" + ("" if quota is None else f", of which a control group allows {quota:g}")
    if usable < 2:
        return warning(
            f"{found}: server, learner and collectors take turns", "give the container at least 2 (docker: --cpus, --cpuset-cpus)"
        )
    if quota is not None and quota < cores and spin_s():
        return warning(
            f"{found}: waits spin as if all were there", f"pin to what is allowed (docker: --cpuset-cpus=0-{max(0, int(quota) - 1)})"
        )
    return ok(found)


def _server_pid(scene: Scene) -> int | None:
    return pid_behind(scene.endpoints.status_path)


def _namespace(pid: str, kind: str) -> int:
    try:
        return Path(f"/proc/{pid}/ns/{kind}").stat().st_ino
    except OSError:
        return 0
