"""Shared memory that two processes map: made whole or not at all, found by name, gone when both let go.

A collector's segment holds its slots, one after the other:

```
0            slot_bytes       2 × slot_bytes                depth × slot_bytes
| slot 0: rows × stride, pad | slot 1 …                    |
```

Nothing in it orders anything: rows are handed over by messages alone (publish, credit). ``slot_bytes`` is a multiple of the page,
so each copy lies inside one pinned range.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from replay_server_protocol.errors import BudgetExceeded, ProtocolViolation

PAGE_BYTES = 4096
_PREFIX = "replay-"
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def segment_dir() -> Path:
    """Folder of the segments: /dev/shm, or the temporary folder on systems without it."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def segment_name(run_id: str, part: str) -> str:
    """Name of a segment: every segment of one server life carries its ``run_id``, so leftovers can be told apart and swept."""
    return f"{_PREFIX}{run_id}-{part}"


def sweep_segments(run_id: str) -> list[str]:
    """Unlinks every segment of a dead server's ``run_id`` and returns their names; mappings of living processes stay valid."""
    swept = []
    for path in segment_dir().iterdir():
        if path.name.startswith(segment_name(run_id, "")):
            path.unlink(missing_ok=True)
            swept.append(path.name)
    return sorted(swept)


def align(n_bytes: int, to: int = PAGE_BYTES) -> int:
    """The next multiple of ``to``."""
    return -(-n_bytes // to) * to


class Segment:
    """One mapping of named shared memory, ``n_bytes`` long. ``bytes`` is its memory as ``uint8[n_bytes]``."""

    def __init__(self, name: str, n_bytes: int, mapping: mmap.mmap) -> None:
        self.name = name
        self.n_bytes = n_bytes
        self._mapping = mapping
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8, n_bytes)
        self.address: int = self.bytes.ctypes.data

    @classmethod
    def create(cls, name: str, n_bytes: int) -> Segment:
        """Makes and maps a new segment with all its pages allocated, so that no later touch can fail.

        Raises BudgetExceeded when the file system has no room (ftruncate alone would succeed, and the first touch kill), or when a limit of
        this process forbids it.
        """
        path = segment_dir() / name
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise
        except OSError as error:
            raise _refused(name, error) from error
        try:
            _allocate(fd, n_bytes)
            return cls(name, n_bytes, mmap.mmap(fd, n_bytes))
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise _refused(name, error) from error
            room = os.statvfs(segment_dir())
            free_bytes = room.f_bavail * room.f_frsize
            raise BudgetExceeded(
                f"{segment_dir()} has {free_bytes:,} bytes free, segment {name} needs {n_bytes:,}; "
                "enlarge it (docker: --shm-size or --ipc=host), or use fewer or smaller slots",
                needed_bytes=n_bytes,
                free_bytes=free_bytes,
            ) from error
        finally:
            os.close(fd)

    @classmethod
    def open(cls, name: str, n_bytes: int) -> Segment:
        """Maps a segment made by another process.

        Raises ProtocolViolation if it is missing or smaller than promised, BudgetExceeded if this process may open no more files.
        """
        if n_bytes < 1 or "/" in name or "\0" in name or not name.startswith(_PREFIX):
            raise ProtocolViolation(f"segment {name!r} of {n_bytes:,} bytes is not one of ours")
        try:
            fd = os.open(segment_dir() / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                raise _refused(name, error) from error
            raise ProtocolViolation(
                f"segment {name} can't be opened ({error.strerror}); the processes must share {segment_dir()} (docker: --ipc=host, or "
                "--ipc=container:NAME)"
            ) from error
        try:
            found = os.fstat(fd).st_size
            if found < n_bytes:
                raise ProtocolViolation(f"segment {name} has {found:,} bytes, {n_bytes:,} were promised")
            return cls(name, n_bytes, mmap.mmap(fd, n_bytes))
        except OSError as error:
            raise _refused(name, error) from error  # the mapping's own descriptor, or no room for it in the address space
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Removes the name; the mappings stay."""
        (segment_dir() / self.name).unlink(missing_ok=True)

    def is_linked(self) -> bool:
        return (segment_dir() / self.name).exists()

    def close(self) -> None:
        """Unmaps, or leaves that to the last view of the memory that somebody still holds."""
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._mapping.close()


def _refused(name: str, error: OSError) -> BudgetExceeded:
    remedy = "raise the limit on open files (ulimit -n)" if error.errno in _NO_DESCRIPTOR else "see the limits of this process (ulimit -a)"
    return BudgetExceeded(f"segment {name} can't be made or mapped in {segment_dir()}: {error.strerror}; {remedy}")


def _allocate(fd: int, n_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, n_bytes)
        return
    chunk = bytes(1 << 20)  # macOS has no posix_fallocate: write the zeros once
    for start in range(0, n_bytes, len(chunk)):
        os.pwrite(fd, chunk[: n_bytes - start], start)
