"""The manifest: what a snapshot holds. A folder with one is a snapshot, without one it is rubbish of a snapshot that was never finished.

```
DIR/                       --snapshot-dir, or the argument of `replay-server snapshot`
  .lock                    held by whoever writes here
  000007/                  one snapshot; numbers rise
    rows-00000.safetensors …    rows in order of their seqs
    moments.safetensors    running moments, if any are kept
    manifest.json          renamed last
```
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from replay_server_protocol.errors import InvalidRequest, SchemaMismatch, shown
from replay_server_protocol.schema import Schema

FORMAT = "replay-server snapshot"
VERSION = 1
MANIFEST = "manifest.json"
_NUMBER = re.compile(r"[0-9]{6,12}")
_FILE = re.compile(r"(rows-[0-9]{5,8}|moments)\.safetensors")
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file of arrays: ``rows`` rows from ``first_seq``, and the CRC-32 of each array's bytes."""

    name: str
    n_bytes: int
    first_seq: int
    rows: int
    crc: Mapping[str, int]

    @property
    def end_seq(self) -> int:
        return self.first_seq + self.rows

    def to_json(self) -> dict[str, object]:
        crc = {name: f"{value:08x}" for name, value in self.crc.items()}
        return {"name": self.name, "bytes": self.n_bytes, "first_seq": self.first_seq, "rows": self.rows, "crc32": crc}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        if not _FILE.fullmatch(found["name"]):
            raise ValueError(f"{shown(found['name'])} is no name of a snapshot's file")
        crc = {str(name): int(value, 16) for name, value in found["crc32"].items()}
        return cls(found["name"], _count(found["bytes"]), _count(found["first_seq"]), _count(found["rows"]), crc)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole snapshot: the rows [tail, committed), which ``files`` hold, and the server's ``state`` of the moment they are of.

    ``left_out`` rows before the tail had been in the window and were overwritten before they could be copied.
    """

    tail: int
    committed: int
    left_out: int
    schema: Schema
    columns: tuple[str, ...]
    state: Mapping[str, Any]
    files: tuple[SavedFile, ...]
    moments: SavedFile | None = None
    path: Path = field(default=Path(), compare=False)

    @property
    def options(self) -> Mapping[str, Any]:
        options = self.state["options"]
        return options if isinstance(options, Mapping) else {}

    def to_json(self) -> bytes:
        content: dict[str, object] = {
            "format": FORMAT,
            "version": VERSION,
            "tail": self.tail,
            "committed": self.committed,
            "left_out": self.left_out,
            "fingerprint": self.schema.fingerprint,
            "schema": self.schema.to_wire(),
            "columns": list(self.columns),
            "state": self.state,
            "files": [file.to_json() for file in self.files],
            "moments": self.moments.to_json() if self.moments else None,
        }
        content["digest"] = _digest(content)
        return json.dumps(content, indent=1, allow_nan=False).encode()

    @classmethod
    def load(cls, path: Path) -> Self:
        """The manifest of the snapshot in the folder ``path``. Raises InvalidRequest naming what is wrong with it."""
        file = path / MANIFEST
        try:
            with file.open("rb") as opened:
                found = json.loads(opened.read(_MOST_BYTES))
        except OSError as error:
            raise InvalidRequest(f"{file} can't be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{file} is damaged or cut short: {shown(str(error))}") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise InvalidRequest(f"{file} is not the manifest of a replay-server snapshot")
        if found.get("version") != VERSION:
            raise InvalidRequest(f"{file} has version {shown(found.get('version'))}, this replay-server reads {VERSION}")
        if found.pop("digest", None) != _digest(found):
            raise InvalidRequest(f"{file} is damaged: it is not what was written")
        try:
            return cls._from_json(found, path)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, SchemaMismatch):
                raise InvalidRequest(f"{file}: {error.message}") from error
            raise InvalidRequest(f"{file} is damaged: {type(error).__name__}: {shown(str(error))}") from error

    @classmethod
    def _from_json(cls, found: Mapping[str, Any], path: Path) -> Self:
        schema = Schema.from_wire(found["schema"])
        tail, committed = _count(found["tail"]), _count(found["committed"])
        files = tuple(SavedFile.from_json(file) for file in found["files"])
        covered = tail
        for file in files:
            if not file.first_seq <= covered <= file.end_seq:
                raise ValueError(f"no file holds seq {covered}")
            covered = file.end_seq
        if covered != committed or tail > committed or schema.fingerprint != found["fingerprint"]:
            raise ValueError(f"rows end at seq {covered}, the snapshot at {committed}")
        moments = SavedFile.from_json(found["moments"]) if found["moments"] else None
        columns = tuple(str(column) for column in found["columns"])
        return cls(tail, committed, _count(found["left_out"]), schema, columns, dict(found["state"]), files, moments, path)


def metadata_of(schema: Schema, first_seq: int) -> dict[str, str]:
    """What the header of a file of rows says of it."""
    return {"format": FORMAT, "version": str(VERSION), "fingerprint": schema.fingerprint, "first_seq": str(first_seq)}


def numbered(directory: Path) -> list[Path]:
    """The folders of snapshots in ``directory``, finished or not, oldest first."""
    try:
        found = [path for path in directory.iterdir() if _NUMBER.fullmatch(path.name) and path.is_dir()]
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"{shown(str(directory))} can't be read: {reason}") from error
    return sorted(found, key=lambda path: int(path.name))


def newest(path: Path) -> Manifest:
    """The snapshot in the folder ``path``, or the newest whole one of the folder of snapshots ``path``.

    A newest one that is damaged is refused and not passed over: who wants an older one names it.
    """
    if os.path.exists(path / MANIFEST):  # Path.exists would raise for a path that can't be
        return Manifest.load(path)
    finished = [folder for folder in numbered(path) if (folder / MANIFEST).exists()]
    if not finished:
        raise InvalidRequest(f"there is no snapshot in {path}: none has a {MANIFEST}")
    try:
        return Manifest.load(finished[-1])
    except InvalidRequest as error:
        if len(finished) > 1:
            raise InvalidRequest(f"{error.message}; the snapshot before it is {finished[-2]}") from error
        raise


def _digest(content: Mapping[str, object]) -> str:
    packed = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{shown(value)} is no count")
    return value
