"""A snapshot's rows, read in order and checked on the way: a block at a time, each file through to its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from replay_server_protocol.errors import InvalidRequest, ProtocolViolation
from replay_server_protocol.moments import Moments

from replay_server.saved.manifest import Manifest, SavedFile, metadata_of
from replay_server.saved.row_arrays import arrays_of
from replay_server.saved.tensor_file import Bytes, TensorReader, header_of


class Block(NamedTuple):
    """Rows that follow one another; ``arrays`` holds each array's bytes of them, valid until the next block."""

    seqs: npt.NDArray[np.int64]
    arrays: Mapping[str, Bytes]


def blocks(manifest: Manifest, first_seq: int, block_rows: int) -> Iterator[Block]:
    """The rows from ``first_seq`` on, in blocks of at most ``block_rows``. Raises InvalidRequest naming the file that is not as written.

    The rows of a file are good only once the next file's first block comes, or the end: then the whole of it was checked.
    """
    arrays = arrays_of(manifest.schema, manifest.columns, 1)
    memory = {array.name: np.empty(block_rows * array.item_bytes, np.uint8) for array in arrays}
    for file in manifest.files:
        if file.end_seq <= first_seq:
            continue
        with _open(manifest, file) as reader:
            for begin in range(file.first_seq, file.end_seq, block_rows):
                n = min(block_rows, file.end_seq - begin)
                read = {name: reader.read(name, n, into) for name, into in memory.items()}
                skipped = max(0, min(n, first_seq - begin))
                if skipped < n:
                    seqs = np.arange(begin + skipped, begin + n, dtype=np.int64)
                    yield Block(seqs, {name: content[skipped * (len(content) // n) :] for name, content in read.items()})
            reader.check(file.crc)


def read_moments(manifest: Manifest) -> dict[str, bytes]:
    """Packed moments by field. Raises InvalidRequest naming the file."""
    if manifest.moments is None:
        return {}
    found = {}
    with _reader(manifest, manifest.moments) as reader:
        try:
            for name, count in zip(manifest.state["moments"], manifest.state["moment_counts"], strict=True):
                array = reader.arrays[f"moments/{name}"]
                values = reader.read(array.name, array.rows, np.empty(array.n_bytes, np.uint8)).view(np.float64)
                found[str(name)] = Moments(int(count), *values.reshape(4, -1)).pack()
        except (KeyError, TypeError, ValueError, ProtocolViolation) as error:
            raise InvalidRequest(f"{reader.path} doesn't hold the moments that its manifest tells of: {error}") from error
        reader.check(manifest.moments.crc)
    return found


def _open(manifest: Manifest, file: SavedFile) -> TensorReader:
    reader = _reader(manifest, file)
    arrays = arrays_of(manifest.schema, manifest.columns, file.rows)
    if reader.header != header_of(arrays, metadata_of(manifest.schema, file.first_seq)):
        reader.close()
        raise InvalidRequest(f"{reader.path} is not the file that its manifest tells of: its header is another's")
    return reader


def _reader(manifest: Manifest, file: SavedFile) -> TensorReader:
    reader = TensorReader(manifest.path / file.name)
    if sum(array.n_bytes for array in reader.arrays.values()) + len(reader.header) != file.n_bytes:
        reader.close()
        raise InvalidRequest(f"{reader.path} has another length than its manifest tells of")
    return reader
