"""A folder of snapshots: one writer at a time, each snapshot whole or not there, the newest N kept.

The order, each step on the disk before the next: the snapshot's folder, its files, their names, the manifest under another name, its
rename, that rename. A crash before the last but one leaves a folder without a manifest, which the next writer removes; the snapshots before
it were not touched. Older ones lose their manifest first, and are deleted only after the new one is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from replay_server_protocol.errors import BudgetExceeded, InvalidRequest

from replay_server.saved.manifest import MANIFEST, Manifest, numbered

_LOCK = ".lock"
_PARTIAL = MANIFEST + ".partial"
_RESERVE_BYTES = 16 << 20


class SnapshotDirectory:
    """``DIR`` while one snapshot is written into it; made by ``open``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[SnapshotDirectory]:
        """Makes the folder if need be, takes its lock, and removes what a killed writer left. Raises InvalidRequest when it can't be."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidRequest(f"snapshots can't be written to {path}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InvalidRequest(f"another snapshot is being written to {path}; wait for it, or name another folder") from error
            directory = cls(path)
            for folder in numbered(path):
                if not (folder / MANIFEST).exists():
                    shutil.rmtree(folder)
            yield directory
        finally:
            os.close(lock)

    def begin(self, n_bytes: int) -> Path:
        """The folder of the next snapshot, of ``n_bytes`` or so. Raises BudgetExceeded when the disk has not that much left."""
        room = os.statvfs(self.path)
        free_bytes = room.f_bavail * room.f_frsize
        if n_bytes + _RESERVE_BYTES > free_bytes:
            raise BudgetExceeded(
                f"a snapshot of {n_bytes:,} bytes doesn't fit {self.path}, which has {free_bytes:,} left",
                needed_bytes=n_bytes,
                free_bytes=free_bytes,
            )
        earlier = numbered(self.path)
        folder = self.path / f"{int(earlier[-1].name) + 1 if earlier else 1:06d}"
        folder.mkdir(mode=0o700)
        sync_folder(self.path)
        return folder

    def commit(self, folder: Path, manifest: Manifest) -> None:
        """Makes it a snapshot; its files are on the disk already."""
        fd = os.open(folder / _PARTIAL, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            content = memoryview(manifest.to_json())
            while content:
                content = content[os.write(fd, content) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folder(folder)
        (folder / _PARTIAL).rename(folder / MANIFEST)
        sync_folder(folder)

    def keep(self, snapshots: int) -> None:
        """Deletes all but the newest so many. One that a server is being restored from stays until the next time."""
        finished = [folder for folder in numbered(self.path) if (folder / MANIFEST).exists()]
        for folder in finished[:-snapshots]:
            with contextlib.ExitStack() as held:
                if hold(folder, held, fcntl.LOCK_EX):
                    (folder / MANIFEST).unlink()
                    sync_folder(folder)
                    shutil.rmtree(folder)
        sync_folder(self.path)


def hold(folder: Path, held: contextlib.ExitStack, kind: int = fcntl.LOCK_SH) -> bool:
    """Keeps a snapshot from being deleted until ``held`` is closed; False when somebody else's lock forbids it."""
    try:
        fd = os.open(folder / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    held.callback(os.close, fd)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sync_folder(path: Path) -> None:
    """Its names are on the disk once this returns."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
