"""Arrays in one file in the safetensors format: no code, no pickle, readable by whoever reads safetensors.

```
|length of the header, u64 little-endian|header: JSON, spaces up to a multiple of 8|array|array|…   no gap between arrays
```

The header gives each array's dtype, shape and place. Here the arrays have one row count, are written and read in step, a block of rows
of each after the other, and so need no more memory than a block. CRC-32 of each array is kept beside the file.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from replay_server_protocol.errors import BudgetExceeded, InvalidRequest, ReplayError, shown
from replay_server_protocol.schema import DTYPES

Bytes = npt.NDArray[np.uint8]

CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
}
MOST_HEADER_BYTES = 1 << 20
_NAMES = {code: name for name, code in CODES.items()}
_LENGTH = struct.Struct("<Q")


class Array(NamedTuple):
    """One array of a file: ``rows`` of ``shape`` each; ``dtype`` is a name of the schema's."""

    name: str
    dtype: str
    rows: int
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes of one row."""
        return np.dtype(DTYPES[self.dtype]).itemsize * math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.rows * self.item_bytes


def header_of(arrays: Sequence[Array], metadata: Mapping[str, str]) -> bytes:
    """The file's beginning, up to its first array; the same for the same arrays."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for array in arrays:
        entries[array.name] = {
            "dtype": CODES[array.dtype],
            "shape": [array.rows, *array.shape],
            "data_offsets": [at, at + array.n_bytes],
        }
        at += array.n_bytes
    packed = json.dumps(entries, separators=(",", ":")).encode()
    packed += b" " * (-len(packed) % 8)
    return _LENGTH.pack(len(packed)) + packed


class TensorWriter:
    """Writes the rows of every array from the first to the last. ``close`` without ``finish`` leaves an unfinished file."""

    def __init__(self, path: Path, arrays: Sequence[Array], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.arrays = {array.name: array for array in arrays}
        self.crc = dict.fromkeys(self.arrays, 0)
        header = header_of(arrays, metadata)
        self._places, self._done, at = {}, dict.fromkeys(self.arrays, 0), len(header)
        for array in arrays:
            self._places[array.name] = at
            at += array.n_bytes
        self.n_bytes = at
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._pwrite(memoryview(header), 0)

    def append(self, name: str, rows: Bytes) -> None:
        """The next rows of one array, as contiguous bytes."""
        content = rows.data.cast("B")
        self._pwrite(content, self._places[name] + self._done[name])
        self.crc[name] = zlib.crc32(content, self.crc[name])
        self._done[name] += len(content)

    def finish(self) -> None:
        """On the disk once this returns: its bytes, not yet its name, which is the folder's."""
        missing = [name for name, array in self.arrays.items() if self._done[name] != array.n_bytes]
        if missing:
            raise ReplayError(f"this is a bug of the snapshot: {self.path.name} lacks rows of {', '.join(missing)}")
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)  # nobody reads it soon: leave the page cache to others

    def close(self) -> None:
        os.close(self._fd)

    def _pwrite(self, content: memoryview, at: int) -> None:
        try:
            while content:
                written = os.pwrite(self._fd, content, at)
                content, at = content[written:], at + written
        except OSError as error:
            raise BudgetExceeded(f"{self.path} can't be written: {error.strerror}; free some room, or snapshot elsewhere") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class TensorReader:
    """Reads arrays of a file in step. Raises InvalidRequest naming the file when it is damaged, cut short or of another kind."""

    def __init__(self, path: Path, most_arrays: int = 4096) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidRequest(f"{path} can't be opened: {error.strerror}") from error
        self.crc: dict[str, int] = {}
        try:
            self.header, entries, self.metadata = self._read_header()
            self.arrays, self._places = _placed(entries, len(self.header), most_arrays)
            self._check_length()
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            os.close(self._fd)
            if isinstance(error, ReplayError):
                raise
            raise InvalidRequest(f"{path} is no safetensors file: {shown(str(error))}") from error
        self._done = dict.fromkeys(self.arrays, 0)
        self.crc = dict.fromkeys(self.arrays, 0)

    def read(self, name: str, rows: int, into: Bytes) -> Bytes:
        """The next ``rows`` rows of one array, as bytes in the beginning of ``into``."""
        content = into[: rows * self.arrays[name].item_bytes]
        view, at = content.data, self._places[name] + self._done[name]
        while view:
            got = os.preadv(self._fd, [view], at)
            if not got:
                raise InvalidRequest(f"{self.path} is cut short in {name}: it lost bytes while it was read")
            view, at = view[got:], at + got
        self.crc[name] = zlib.crc32(content.data, self.crc[name])
        self._done[name] += len(content)
        return content

    def check(self, crc: Mapping[str, int]) -> None:
        """After the last row: raises InvalidRequest unless every array is what was written."""
        for name, expected in crc.items():
            if self.crc.get(name) != expected:
                raise InvalidRequest(f"{self.path}: {name} is damaged, its bytes are not those that were written")

    def close(self) -> None:
        os.close(self._fd)

    def _read_header(self) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
        begin = os.pread(self._fd, _LENGTH.size, 0)
        if len(begin) < _LENGTH.size:
            raise ValueError("shorter than a header")
        (length,) = _LENGTH.unpack(begin)
        if length > MOST_HEADER_BYTES:
            raise ValueError(f"a header of {length:,} bytes")
        packed = os.pread(self._fd, length, _LENGTH.size)
        if len(packed) < length:
            raise ValueError("its header is cut short")
        entries = json.loads(packed)
        if not isinstance(entries, dict):
            raise ValueError("its header is no map")
        metadata = entries.pop("__metadata__", {})
        return begin + packed, entries, metadata if isinstance(metadata, dict) else {}

    def _check_length(self) -> None:
        expected, found = len(self.header) + sum(array.n_bytes for array in self.arrays.values()), os.fstat(self._fd).st_size
        if found != expected:
            raise InvalidRequest(f"{self.path} has {found:,} bytes, its header tells of {expected:,}: it is cut short or damaged")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _placed(entries: Mapping[str, Any], begin: int, most_arrays: int) -> tuple[dict[str, Array], dict[str, int]]:
    """Arrays and where each begins in the file; raises ValueError unless they lie one after the other."""
    if len(entries) > most_arrays:
        raise ValueError(f"{len(entries):,} arrays")
    arrays, places, end = {}, {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0]):
        rows, *shape = [_count(n) for n in entry["shape"]] or [1]
        array = Array(name, _NAMES[entry["dtype"]], rows, tuple(shape))
        first, last = (_count(n) for n in entry["data_offsets"])
        if first != end or last - first != array.n_bytes:
            raise ValueError(f"{name} lies at {first:,} to {last:,}, not behind what comes before")
        arrays[name], places[name], end = array, begin + first, last
    return arrays, places


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{shown(value)} is no count")
    return value
