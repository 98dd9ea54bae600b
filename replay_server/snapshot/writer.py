"""A snapshot taken while the server goes on: the window of one moment, copied piece by piece under short leases, straight to disk.

```
CAPTURE: tail, committed, state ─► file by file, oldest rows first ─► [committed reached] ─► manifest
                                          │ ingest overtakes again and again
                                          └─► newest rows first, in smaller files, as far as the rows last
```

What memory it takes does not depend on the ring: the observer's bounce, and as much again to lay a field's values side by side. Rows that
ingest overwrites before their turn are left out. What is kept is one run of rows up to the captured ``committed``, and none after that.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from replay_server_protocol.errors import InvalidRequest, ReplayError
from replay_server_protocol.messages import Captured
from replay_server_protocol.moments import Moments
from replay_server_protocol.schema import Schema

from replay_server.saved.directory import SnapshotDirectory, sync_folder
from replay_server.saved.manifest import Manifest, SavedFile, metadata_of
from replay_server.saved.row_arrays import Int64s, Kept, arrays_of, save
from replay_server.saved.tensor_file import Array, Bytes, TensorWriter

FILE_BYTES = 256 << 20
PIECE_BYTES = 4 << 20
_OVERTAKEN_OFTEN = 3
_SMALL_PIECES = 2
_MOST_SMALL_FILES = 1000
MOMENTS_FILE = "moments.safetensors"


class Copied(Kept, Protocol):
    """One copied piece; ``overtaken`` are the seqs asked for that had left the window, always the first ones."""

    @property
    def overtaken(self) -> Int64s: ...


class Source(Protocol):
    """Where rows come from: an Observer."""

    def copies(self, first_seq: int, end_seq: int, *, timeout: float | None = None) -> Iterator[Copied]: ...

    def capture(self, timeout: float | None = 10.0) -> Captured: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a snapshot is: rows done of those there are to do, and bytes written."""

    done_rows: int
    rows: int
    n_bytes: int
    elapsed_s: float

    @property
    def share(self) -> float:
        return self.done_rows / self.rows if self.rows else 1.0


@dataclass(frozen=True, slots=True)
class Taken:
    """A finished snapshot."""

    path: Path
    manifest: Manifest
    n_bytes: int
    seconds: float


def take_snapshot(
    source: Source,
    directory: Path,
    *,
    keep: int | None = None,
    tell: Callable[[Progress], None] = lambda progress: None,
    file_bytes: int = FILE_BYTES,
) -> Taken:
    """Writes the window of now as the next snapshot in ``directory``, then deletes all but the ``keep`` newest (None: none).

    Raises InvalidRequest when the folder can't be used or the window is empty, BudgetExceeded when the disk is full, ServerGone; what was
    written is then removed, and the snapshots before it are as they were.
    """
    begin_s = time.monotonic()
    with SnapshotDirectory.open(directory) as snapshots:
        captured = source.capture()
        copying = _Copying(source, captured, tell, file_bytes, begin_s)
        if captured.tail == captured.committed:
            raise InvalidRequest("there are no rows to snapshot yet: the window is empty")
        folder = snapshots.begin(copying.estimated_bytes)
        try:
            manifest = copying.copy_to(folder)
            moments = _write_moments(folder, copying.schema, captured)
            sync_folder(folder)
            manifest = replace(manifest, moments=moments, path=folder)
            snapshots.commit(folder, manifest)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if keep is not None:
            snapshots.keep(keep)
    n_bytes = sum(file.n_bytes for file in (*manifest.files, *((moments,) if moments else ())))
    return Taken(folder, manifest, n_bytes, time.monotonic() - begin_s)


class _Copying:
    """The files of rows of one snapshot, and which of the rows are lost to ingest so far: those before ``_first_seq``."""

    def __init__(self, source: Source, captured: Captured, tell: Callable[[Progress], None], file_bytes: int, begin_s: float) -> None:
        self.schema = Schema.from_wire(captured.state["schema"])
        self._source = source
        self._captured = captured
        self._tell = tell
        self._begin_s = begin_s
        columns, ring_rows = captured.state["columns"], captured.state["ring_rows"]
        if not isinstance(columns, list) or not isinstance(ring_rows, int):
            raise InvalidRequest("the server's state lacks its columns: it is of another version")
        self._columns, self._ring_rows = tuple(map(str, columns)), ring_rows
        self._item_bytes = sum(array.item_bytes for array in arrays_of(self.schema, self._columns, 1))
        self._file_rows = max(1, file_bytes // self._item_bytes)
        self._piece_rows = max(1, PIECE_BYTES // self._item_bytes)
        self._scratch = np.empty(self._piece_rows * max(field.n_bytes for field in self.schema), np.uint8)
        self._first_seq = captured.tail
        self._times_overtaken = 0
        self._n_bytes = 0
        self._done_rows = 0

    @property
    def estimated_bytes(self) -> int:
        return (self._captured.committed - self._captured.tail) * self._item_bytes

    def copy_to(self, folder: Path) -> Manifest:
        tail, committed = self._captured.tail, self._captured.committed
        files: list[SavedFile] = []
        first, end, number = tail, committed, 0  # what is still to be read
        while max(first, self._first_seq) < end:
            first = max(first, self._first_seq)
            if self._is_behind:
                rows = min(end - first, max(_SMALL_PIECES * self._piece_rows, (committed - tail) // _MOST_SMALL_FILES))
                file = self._write_file(folder, number, end - rows, end)
                end -= rows
            else:
                file = self._write_file(folder, number, first, min(first + self._file_rows, end))
                first += file.rows
            files.append(file)
            number += 1
        kept = sorted((file for file in files if file.end_seq > self._first_seq), key=lambda file: file.first_seq)
        for file in files:
            if file not in kept:
                (folder / file.name).unlink(missing_ok=True)
        if not kept:
            raise ReplayError(
                "ingest overwrites rows faster than they can be copied: none could be kept; a larger --capacity gives more time"
            )
        left_out = self._first_seq - tail
        return Manifest(self._first_seq, committed, left_out, self.schema, self._columns, self._captured.state, tuple(kept))

    @property
    def _is_behind(self) -> bool:
        """Ingest overtakes again and again: the oldest rows are a race that is lost."""
        return self._times_overtaken >= _OVERTAKEN_OFTEN

    def _write_file(self, folder: Path, number: int, first: int, end: int) -> SavedFile:
        """The rows [first, end); the places of those that were overtaken hold zeros.

        Given up, and gone, once ingest has overtaken too often: it then has no rows.
        """
        was_behind = self._is_behind
        name, committed = f"rows-{number:05d}.safetensors", self._captured.committed
        metadata = metadata_of(self.schema, first)
        with TensorWriter(folder / name, arrays_of(self.schema, self._columns, end - first), metadata) as file:
            for begin in range(first, end, self._piece_rows):
                piece_end = min(begin + self._piece_rows, end)
                for chunk in self._source.copies(begin, piece_end):
                    self._note_overtaken(file, chunk)
                    if len(chunk.seqs):
                        save(chunk, self.schema, self._ring_rows, committed, self._scratch, file.append)
                if self._is_behind and not was_behind:
                    file.path.unlink()
                    return SavedFile(name, 0, first, 0, {})
                self._done_rows += piece_end - begin
                self._n_bytes += (piece_end - begin) * self._item_bytes
                elapsed_s = time.monotonic() - self._begin_s
                self._tell(Progress(self._done_rows, committed - self._captured.tail, self._n_bytes, elapsed_s))
            file.finish()
            return SavedFile(name, file.n_bytes, first, end - first, file.crc)

    def _note_overtaken(self, file: TensorWriter, chunk: Copied) -> None:
        n = len(chunk.overtaken)
        if not n:
            return
        self._first_seq = max(self._first_seq, int(chunk.overtaken[-1]) + 1)
        self._times_overtaken += 1
        for array in file.arrays.values():
            file.append(array.name, np.zeros(n * array.item_bytes, np.uint8))


def _write_moments(folder: Path, schema: Schema, captured: Captured) -> SavedFile | None:
    """``moments/FIELD``: float64[4, elements] of mean, squares, low, high; the counts are in the manifest's state."""
    names, counts = captured.state["moments"], []
    arrays: dict[str, Bytes] = {}
    for name, packed in zip(names if isinstance(names, list) else [], captured.moments, strict=True):
        moments = Moments.unpack(packed, (len(packed) - 8) // 32)
        counts.append(moments.count)
        arrays[f"moments/{name}"] = np.frombuffer(packed, np.uint8, offset=8)
    captured.state["moment_counts"] = counts
    if not arrays:
        return None
    placed = [Array(name, "float64", 4, (len(content) // 32,)) for name, content in arrays.items()]
    with TensorWriter(folder / MOMENTS_FILE, placed, metadata_of(schema, 0)) as file:
        for name, content in arrays.items():
            file.append(name, content)
        file.finish()
        return SavedFile(MOMENTS_FILE, file.n_bytes, 0, 0, file.crc)
