"""Checks of the run directory, and of what dead servers left: files, segments, learners that hold a dead server's ring."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from replay_server_protocol.endpoints import SPAWNED_DIRS, Endpoints
from replay_server_protocol.segment import segment_dir

from replay_server.doctor.finding import Finding, failure, ok, warning
from replay_server.doctor.scene import Scene, pid_behind
from replay_server.run_directory import read_holders, read_record

_SEGMENT_PREFIX = "replay-"
_MOST_NAMED = 4


def run_directory(scene: Scene) -> Finding:
    """Private, ours, on a local file system with room for sockets and a lock."""
    folder = scene.endpoints.run_dir
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return _parent(folder)
    except OSError as error:
        return failure(f"{folder}: {error.strerror}", "choose another --run-dir")
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return failure(f"{folder} is not a directory of uid {os.getuid()}", "choose another --run-dir")
    if status.st_mode & 0o077:
        return failure(f"{folder} is open to other users (mode {status.st_mode & 0o777:o})", f"chmod 700 {folder}")
    return _writable(folder, f"{folder}, mode 700")


def leftovers(scene: Scene) -> Finding:
    """Run directories and names whose server is gone."""
    dead = [endpoints for endpoints in _names(scene.endpoints.run_dir) if pid_behind(endpoints.control_path) is None]
    if not dead:
        return ok("no name of a dead server")
    named = _few([f"{endpoints.name} in {endpoints.run_dir}" for endpoints in dead])
    commands = _few([f"rm {endpoints.run_dir}/{endpoints.name}.*" for endpoints in dead], "; ")
    return warning(
        f"left by dead servers: {named}", f"the next server of that name sweeps them; or, when none is just starting: {commands}"
    )


def segments(scene: Scene) -> Finding:
    """Shared memory whose server is gone: it takes room until somebody removes it."""
    folder, mine = segment_dir(), os.getuid()
    sizes: dict[str, int] = {}
    for path in folder.glob(f"{_SEGMENT_PREFIX}*-*"):
        try:
            status = path.lstat()
        except OSError:
            continue  # gone meanwhile
        if status.st_uid == mine:
            run = path.name.split("-")[1]
            sizes[run] = sizes.get(run, 0) + status.st_size
    alive = _living_runs(scene) | {run for run in sizes if _is_mapped(scene, f"{folder}/{_SEGMENT_PREFIX}{run}-")} if sizes else set()
    dead = sorted(set(sizes) - alive)
    if not dead:
        return ok(f"{sum(sizes.values()):,} bytes in {folder}, all of living servers" if sizes else f"none in {folder}")
    found = f"{sum(sizes[run] for run in dead):,} bytes in {folder} that no process maps: {_few([_SEGMENT_PREFIX + run for run in dead])}"
    commands = _few([f"rm {folder}/{_SEGMENT_PREFIX}{run}-*" for run in dead], "; ")
    return warning(found, f"the next server of that name sweeps them; or, if no server of another --run-dir runs: {commands}")


def holders(scene: Scene) -> Finding:
    """Learners that may still hold the ring of a server that is gone."""
    if pid_behind(scene.endpoints.control_path) is not None:
        return ok("the server is alive")
    living = [holder for holder in read_holders(scene.endpoints) if holder.is_alive()]
    if not living:
        return ok("no learner holds the ring of a dead server")
    named = _few([f"{holder.name} (pid {holder.pid})" for holder in living])
    return warning(
        f"{named} may hold the ring of a dead server", "it lets go when it next calls its learner, or ends; else: kill it by its pid"
    )


def logout(scene: Scene) -> Finding:
    """systemd's logind removes a user's shared memory when the last session ends."""
    if not Path("/run/systemd/system").is_dir() or os.getuid() < 1000:
        return ok("shared memory outlives a logout (no systemd, or a system user)")
    if Path(f"/var/lib/systemd/linger/{scene.environment.get('USER', '')}").is_file() or _keeps_shared_memory():
        return ok("shared memory outlives a logout")
    return warning(
        "logind removes this user's /dev/shm at the last logout (RemoveIPC=yes)", "loginctl enable-linger, or RemoveIPC=no in logind.conf"
    )


def _names(run_dir: Path) -> Iterator[Endpoints]:
    """Every name with a lock or a socket, here and where spawn made directories."""
    for folder in (run_dir, *sorted(Path(tempfile.gettempdir()).glob(SPAWNED_DIRS))):
        try:
            if folder.lstat().st_uid != os.getuid():
                continue
            files = sorted(folder.iterdir())
        except OSError:
            continue
        names = dict.fromkeys(path.stem for path in files if path.suffix in (".lock", ".control", ".status"))
        yield from (Endpoints(folder, name) for name in names)


def _living_runs(scene: Scene) -> set[str]:
    living = (endpoints for endpoints in _names(scene.endpoints.run_dir) if pid_behind(endpoints.control_path) is not None)
    return {str(read_record(endpoints.lock_path).get("run_id")) for endpoints in living}


def _is_mapped(scene: Scene, path: str) -> bool:
    return any(path in scene.read(f"{folder.name}/maps") for folder in scene.proc.iterdir() if folder.name.isdigit())


def _parent(folder: Path) -> Finding:
    parent = next((above for above in folder.parents if above.exists()), Path("/"))
    return _writable(parent, f"{folder} is not there yet; a server makes it")


def _writable(folder: Path, found: str) -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, 4096)
    except OSError as error:
        return failure(f"{found}; no file can be made in {folder}: {error.strerror}", "free space there, or choose another --run-dir")
    return ok(found)


def _keeps_shared_memory() -> bool:
    try:
        lines = Path("/etc/systemd/logind.conf").read_text("utf-8", errors="replace").split()
    except OSError:
        return False
    return "RemoveIPC=no" in lines


def _few(names: list[str], between: str = ", ") -> str:
    rest = len(names) - _MOST_NAMED
    return between.join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
