"""Rows of files that others made: arrays read in step from npz or safetensors, a block at a time, under this project's names.

Names of Minari and D4RL are understood: observations, actions, rewards, terminations or terminals, truncations or timeouts.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from replay_server_protocol.errors import InvalidRequest, shown
from replay_server_protocol.schema import DTYPES

from replay_server.saved.tensor_file import TensorReader

Values = npt.NDArray[np.generic]

OTHER_NAMES = {
    "observations": "obs",
    "actions": "action",
    "rewards": "reward",
    "terminations": "terminated",
    "terminals": "terminated",
    "truncations": "truncated",
    "timeouts": "truncated",
    "next_observations": "next_obs",
}
_MOST_ARRAYS = 256
_LEFT_ASIDE = "_seq"


class Described(NamedTuple):
    """An array of a file: ``dtype`` is a name of the schema's, ``shape`` that of a row."""

    dtype: str
    rows: int
    shape: tuple[int, ...]


class ArrayFile(Protocol):
    """Arrays by name, each read from its first row to its last."""

    arrays: dict[str, Described]

    def read(self, name: str, rows: int) -> Values:
        """The next ``rows`` rows."""


@contextlib.contextmanager
def open_arrays(path: Path) -> Iterator[ArrayFile]:
    """The arrays of a .npz or .safetensors file. Raises InvalidRequest naming the file and what is wrong with it. Nothing is unpickled."""
    with contextlib.ExitStack() as opened:
        if path.suffix == ".safetensors":
            found: ArrayFile = _Tensors(opened.enter_context(TensorReader(path)))
        elif path.suffix == ".npz":
            found = _Npz(path, opened)
        else:
            raise InvalidRequest(f"{path}: a file whose name ends in .npz or .safetensors")
        yield _Renamed(found, path)


class _Tensors:
    """Of a file of a snapshot's rows what lies beside them (names with a slash) is left aside."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self.arrays = {a.name: Described(a.dtype, a.rows, a.shape) for a in reader.arrays.values() if "/" not in a.name}

    def read(self, name: str, rows: int) -> Values:
        array = self._reader.arrays[name]
        content = self._reader.read(name, rows, np.empty(rows * array.item_bytes, np.uint8))
        return content.view(DTYPES[array.dtype]).reshape(rows, *array.shape)


class _Npz:
    """Streams the members side by side: none is ever in memory as a whole."""

    def __init__(self, path: Path, opened: contextlib.ExitStack) -> None:
        self._path = path
        self.arrays: dict[str, Described] = {}
        self._streams: dict[str, tuple[IO[bytes], np.dtype[np.generic]]] = {}
        try:
            archive = opened.enter_context(zipfile.ZipFile(path))
            for member in archive.namelist()[: _MOST_ARRAYS + 1]:
                name, stream = member.removesuffix(".npy"), opened.enter_context(archive.open(member))
                dtype, rows, shape = _npy_header(stream, name)
                self.arrays[name] = Described(dtype.name, rows, shape)
                self._streams[name] = (stream, dtype)
        except FileNotFoundError as error:
            raise InvalidRequest(f"{path} can't be read: {error.strerror}") from error
        except (OSError, ValueError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile) as error:
            raise InvalidRequest(f"{path} is no npz file that can be read: {shown(str(error))}") from error

    def read(self, name: str, rows: int) -> Values:
        stream, dtype = self._streams[name]
        shape = (rows, *self.arrays[name].shape)
        n_bytes = dtype.itemsize * int(np.prod(shape))
        try:
            content = stream.read(n_bytes)
        except (OSError, EOFError, zipfile.BadZipFile) as error:
            raise InvalidRequest(f"{self._path}: {name} is damaged: {error}") from error
        if len(content) != n_bytes:
            raise InvalidRequest(f"{self._path} is cut short in {name}")
        return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


class _Renamed:
    """The arrays under this project's names, each with the same number of rows but for observations of one more a episode."""

    def __init__(self, file: ArrayFile, path: Path) -> None:
        self._file = file
        self._names: dict[str, str] = {}
        for name in file.arrays:
            head, dot, rest = name.partition(".")
            known = OTHER_NAMES.get(head, head) + dot + rest
            if known in self._names:
                raise InvalidRequest(f"{path}: {self._names[known]} and {name} both mean {known}")
            if name != _LEFT_ASIDE:
                self._names[known] = name
        if not self._names or len(self._names) > _MOST_ARRAYS:
            raise InvalidRequest(f"{path} has {len(self._names)} arrays, 1 to {_MOST_ARRAYS} are right")
        self.arrays = {known: file.arrays[name] for known, name in self._names.items()}

    def read(self, name: str, rows: int) -> Values:
        return self._file.read(self._names[name], rows)


def _npy_header(stream: IO[bytes], name: str) -> tuple[np.dtype[np.generic], int, tuple[int, ...]]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(stream)
    if dtype.hasobject or dtype.name not in DTYPES:
        raise ValueError(f"{name} is an array of {dtype}, which no field can hold")
    if not shape or (is_fortran and len(shape) > 1):
        raise ValueError(f"{name} must be an array of rows in C order")
    return dtype, shape[0], shape[1:]


def rows_of(arrays: Mapping[str, Described], path: Path) -> int:
    """How many rows the file has: what all arrays agree on, but for observations. Raises InvalidRequest naming those that differ."""
    counts = {name: array.rows for name, array in arrays.items() if not is_observation(name)} or {n: a.rows for n, a in arrays.items()}
    if len(set(counts.values())) != 1:
        raise InvalidRequest(f"{path}: arrays of one file have one number of rows: {', '.join(f'{n} {c:,}' for n, c in counts.items())}")
    return next(iter(counts.values()))


def is_observation(name: str) -> bool:
    return name.partition(".")[0] == "obs"
