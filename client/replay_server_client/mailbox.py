"""Mailboxes: small sets of named arrays, whole versions only, lent by message in segments that the server made.

```
poster            server                     reader            server
  MAIL_POST ─────────►                         MAIL_ASK ──────────►
  ◄───────── MAIL_SLOT                         ◄───────── MAIL_LENT (version 0: none)
  MAIL_WRITTEN ──────►                         MAIL_RETURN ───────►  once the arrays are copied out
  ◄────────────── DONE (version)               ◄───────── MAIL_NEWS, whenever there is a newer one
```

Both sides are told messages and say what to send; who owns the connection does the waiting. A manifest places the arrays:
``{"arrays": [[name, dtype, shape, offset], …]}``. bfloat16 arrays go in and come out as the uint16 of their bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from replay_server_protocol.codec import is_text
from replay_server_protocol.errors import InvalidRequest, ProtocolViolation, ReplayError, shown
from replay_server_protocol.messages import (
    Done,
    MailAsk,
    MailLent,
    MailNews,
    MailPost,
    MailReturn,
    MailSlot,
    MailWritten,
    Refused,
    ServerMessage,
)
from replay_server_protocol.schema import DTYPES
from replay_server_protocol.segment import Segment, align

from replay_server_client.connection import Connection, error_of
from replay_server_client.rows import Array, as_array

Arrays = dict[str, Array]
Mail = tuple[int, Arrays]

_ALIGNMENT_BYTES = 64
_MAX_ARRAYS = 4096
_MAX_NAME = 256
_MAX_DIMENSIONS = 16


@dataclass(frozen=True, slots=True)
class Parcel:
    """Arrays with their places: what is posted."""

    arrays: tuple[Array, ...]
    offsets: tuple[int, ...]
    n_bytes: int
    manifest: dict[str, object]

    @classmethod
    def of(cls, arrays: Mapping[str, object]) -> Parcel:
        """Places named arrays one after the other. Raises InvalidRequest naming the array that can't be sent."""
        if not isinstance(arrays, Mapping) or not 1 <= len(arrays) <= _MAX_ARRAYS:
            raise InvalidRequest(f"a mailbox takes a mapping of 1 to {_MAX_ARRAYS} named arrays")
        hosted, offsets, places, end = [], [], [], 0
        for name, value in arrays.items():
            if not isinstance(name, str) or len(name) > _MAX_NAME or not is_text(name):
                raise InvalidRequest(f"array name {shown(name)}: a text of at most {_MAX_NAME} characters")
            try:
                array, dtype = as_array(value)
            except TypeError as error:
                raise InvalidRequest(f"array {shown(name)}: {error}") from error
            if dtype not in DTYPES or array.ndim > _MAX_DIMENSIONS:
                raise InvalidRequest(f"array {shown(name)}: {dtype}{list(array.shape)} can't be posted; dtypes are {', '.join(DTYPES)}")
            hosted.append(array)
            offsets.append(end)
            places.append([name, dtype, list(array.shape), end])
            end = align(end + array.nbytes, _ALIGNMENT_BYTES)
        return cls(tuple(hosted), tuple(offsets), max(end, _ALIGNMENT_BYTES), {"arrays": places})

    def write(self, memory: npt.NDArray[np.uint8]) -> None:
        """Copies the arrays into ``memory`` (``uint8[n_bytes]``)."""
        for array, offset in zip(self.arrays, self.offsets, strict=True):
            np.ndarray(array.shape, array.dtype, memory.data, offset)[...] = array


def unpack(manifest: Mapping[str, object], memory: npt.NDArray[np.uint8]) -> Arrays:
    """Copies of the arrays that ``manifest`` places in ``memory``. Raises ProtocolViolation if one doesn't lie inside it."""
    places = manifest.get("arrays")
    if not isinstance(places, list):
        raise ProtocolViolation("a manifest lists arrays")
    arrays: Arrays = {}
    for place in places:
        match place:
            case [str(name), str(dtype), list(shape), int(offset)] if dtype in DTYPES and _is_shape(shape) and offset >= 0:
                kind = np.dtype(DTYPES[dtype])
                if offset + kind.itemsize * math.prod(shape) > len(memory):
                    raise ProtocolViolation(f"array {shown(name)} does not lie inside its segment of {len(memory):,} bytes")
                arrays[name] = np.ndarray(tuple(shape), kind, memory.data, offset).copy()
            case _:
                raise ProtocolViolation(f"manifest: {str(place)[:80]} must be [name, dtype, shape, offset]")
    return arrays


def _is_shape(shape: list[object]) -> bool:
    return len(shape) <= _MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)


class MailReader:
    """What a client knows of mailboxes. ``ask``, then pass messages to ``accept`` until ``has_answer``, then ``take``.

    A late answer, which nobody waits for any more, is returned to the server at once.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._newest: dict[str, int] = {}  # asked for in this session: the newest version heard of
        self._old: dict[str, int] = {}  # versions handed out that belong to a lost server
        self._taken: dict[str, int] = {}
        self._awaited: str | None = None
        self._answer: Mail | None = None

    @property
    def has_answer(self) -> bool:
        return self._awaited is None

    def has_news(self, name: str, newer_than: int) -> bool:
        """False when ``name`` was asked for before and nothing newer was heard of: asking would be in vain."""
        return self._newest.get(name, newer_than + 1) > self._since(name, newer_than)

    def ask(self, name: str, newer_than: int) -> None:
        connection = self._connection
        self._awaited, self._answer = name, None
        connection.send(MailAsk(connection.session, connection.generation, name, self._since(name, newer_than)))
        self._newest.setdefault(name, 0)

    def accept(self, message: ServerMessage) -> bool:
        """True if the message was mail. Arrays are copied out and their segment is returned before this ends."""
        if isinstance(message, MailNews):
            self._newest[message.name] = max(self._newest.get(message.name, 0), message.version)
            return True
        if not isinstance(message, MailLent):
            return False
        is_awaited = message.name == self._awaited
        if is_awaited:
            self._awaited = None
        if message.version:
            self._newest[message.name] = max(self._newest.get(message.name, 0), message.version)
            try:
                if is_awaited:
                    with self._connection.opening_memory():
                        self._answer = message.version, _read(message)
            finally:
                connection = self._connection
                connection.send(MailReturn(connection.session, connection.generation, message.name, message.version))
        return True

    def take(self, name: str) -> Mail | None:
        """The answer to the last ``ask``: (version, arrays), or None if there is nothing newer."""
        answer, self._answer = self._answer, None
        if answer is not None:
            self._taken[name] = answer[0]
            self._old.pop(name, None)
        return answer

    def give_up(self) -> None:
        """Nobody waits for the answer any more."""
        self._awaited = None

    def forget(self) -> None:
        """The server is gone. Its successor counts versions from 1 again, so a version handed out before is older than any of them."""
        self._old |= self._taken
        self._taken, self._newest, self._awaited, self._answer = {}, {}, None, None

    def _since(self, name: str, newer_than: int) -> int:
        return 0 if newer_than <= self._old.get(name, -1) else newer_than


class MailPoster:
    """Posts versions. ``start``, then pass messages to ``accept`` until ``version`` is not None."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._number = 0
        self._parcel: Parcel | None = None
        self._version: int | None = None
        self._refusal: ReplayError | None = None

    @property
    def version(self) -> int | None:
        """The version the last post became, None while it is under way. Raises the error it was refused with."""
        if self._refusal is not None:
            raise self._refusal
        return self._version

    def start(self, name: str, arrays: Mapping[str, object]) -> None:
        """Asks for a segment. The arrays must stay as they are until the version is there. Raises InvalidRequest for what can't be sent."""
        parcel = Parcel.of(arrays)
        self._number += 1
        self._parcel, self._version, self._refusal = parcel, None, None
        connection = self._connection
        connection.send(MailPost(connection.session, connection.generation, self._number, name, parcel.n_bytes, parcel.manifest))

    def accept(self, message: ServerMessage) -> bool:
        """True if the message answers the last post."""
        if not isinstance(message, MailSlot | Done | Refused) or message.number != self._number:
            return False
        if isinstance(message, MailSlot):
            self._fill(message)
        elif isinstance(message, Done):
            self._version = message.result
        elif message.about in (MailPost.__name__, MailWritten.__name__):
            self._refusal = error_of(message)
        else:
            return False
        return True

    def _fill(self, slot: MailSlot) -> None:
        parcel, self._parcel = self._parcel, None
        if parcel is None:
            return  # a repeated MAIL_SLOT
        if slot.n_bytes < parcel.n_bytes:
            raise ProtocolViolation(f"asked for {parcel.n_bytes:,} bytes of mailbox, {slot.n_bytes:,} were lent")
        with self._connection.opening_memory():
            segment = Segment.open(slot.segment, slot.n_bytes)
        try:
            parcel.write(segment.bytes)
        finally:
            segment.close()
        self._connection.send(MailWritten(self._connection.session, self._connection.generation, slot.number))


def _read(lent: MailLent) -> Arrays:
    segment = Segment.open(lent.segment, lent.n_bytes)
    try:
        return unpack(lent.manifest, segment.bytes)
    finally:
        segment.close()
