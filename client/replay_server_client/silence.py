"""What can be seen from here of a server that does not answer, for the text of an error: who it is, whether it is stopped, what to try."""

from __future__ import annotations

import json

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.process import ProcessIdentity


def why_nobody_answers(endpoints: Endpoints, waited_s: float) -> str:
    """Of a name that a client can't connect to: there is no such server, or it holds the name and is stopped or busy."""
    holder = _holder_of(endpoints)
    if holder is not None and holder.is_alive():
        return f"{why_silent(endpoints.name, holder)} (for {waited_s:.1f} s, in {endpoints.run_dir})"
    return (
        f"no server called {endpoints.name!r} answered in {endpoints.run_dir} for {waited_s:.1f} s; "
        f"start one with: replay-server serve --name {endpoints.name} --run-dir {endpoints.run_dir}"
    )


def is_held(endpoints: Endpoints) -> bool:
    """Whether a living process holds the name, as its lock file says; cheap where there is none."""
    holder = _holder_of(endpoints)
    return holder is not None and holder.is_alive()


def why_silent(name: str, server: ProcessIdentity) -> str:
    """Of a server that a client is attached to."""
    if server.is_stopped():
        return f"server {name!r} (pid {server.pid}) does not answer, its process is stopped: continue it with kill -CONT {server.pid}"
    return f"server {name!r} (pid {server.pid}) does not answer: it may be busy, or its machine is; see top, and its log"


def _holder_of(endpoints: Endpoints) -> ProcessIdentity | None:
    """Who holds the name, as its lock file says; None when that says nothing."""
    try:
        record = json.loads(endpoints.lock_path.read_bytes()[:65536])
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict):
        return None
    pid, start_ticks = record.get("pid"), record.get("start_ticks")
    return ProcessIdentity(pid, start_ticks) if isinstance(pid, int) and isinstance(start_ticks, int) and start_ticks > 0 else None
