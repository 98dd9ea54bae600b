"""Rows in a file of their own: npz for numpy, safetensors for the rest; whole or not at all.

Each field is an array ``dtype[n, *shape]``; ``_seq`` says which row is which. numpy has no bfloat16: an npz holds the uint16 of its bits.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
from replay_server_protocol.errors import InvalidRequest, ReplayError
from replay_server_protocol.schema import Schema

from replay_server.saved.tensor_file import Array, header_of

SEQ = "_seq"

Arrays = Mapping[str, npt.NDArray[np.generic]]


def check_file(path: str) -> None:
    """Raises InvalidRequest unless ``path`` ends in .npz or .safetensors and a file can be made beside it."""
    if Path(path).suffix not in (".npz", ".safetensors"):
        raise InvalidRequest(f"{path!r}: a file whose name ends in .npz or .safetensors")
    if Path(path).exists() and not Path(path).is_file():
        raise InvalidRequest(f"{path!r}: a folder or a device; name a file")
    if not os.access(Path(path).parent, os.W_OK):
        raise InvalidRequest(f"{path!r} can't be written: name a file in a folder that is there and yours")


def write_rows(path: str, seqs: npt.NDArray[np.int64], fields: Arrays, schema: Schema) -> None:
    """Writes the file and then gives it its name. Raises InvalidRequest as ``check_file``, ReplayError when the disk is full."""
    check_file(path)
    if SEQ in fields:
        raise InvalidRequest(f"a field is called {SEQ}, the name of the rows' numbers: leave it out with --fields")
    arrays = {SEQ: seqs, **fields}
    beside = ""
    try:
        with tempfile.NamedTemporaryFile(dir=Path(path).parent, prefix=f".{Path(path).name}-", delete=False) as file:
            beside = file.name
            if path.endswith(".npz"):
                np.savez(file, **arrays)  # type: ignore[arg-type]  # no array of objects is among them
            else:
                _write_safetensors(file, arrays, {SEQ: "int64", **{name: schema[name].dtype for name in fields}})
        os.replace(beside, path)
    except BaseException as error:
        if beside:
            Path(beside).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ReplayError(f"{path!r} was not written: {error.strerror}; free space there or name another place") from error
        raise


def _write_safetensors(file: IO[bytes], arrays: Arrays, dtypes: Mapping[str, str]) -> None:
    file.write(header_of([Array(name, dtypes[name], len(array), array.shape[1:]) for name, array in arrays.items()], {}))
    for array in arrays.values():
        file.write(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
