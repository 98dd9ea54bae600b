"""Messages to bytes and back: msgpack arrays ``[code, field, field, …]``, every field checked before a message exists.

Nothing received is executed, unpickled or used as a size. A message that isn't one raises ProtocolViolation naming the message and
the field; the annotations in messages.py are the only place where limits stand.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgpack  # type: ignore[import-untyped]

from replay_server_protocol.errors import ProtocolViolation, shown
from replay_server_protocol.messages import MAX_MESSAGE_BYTES, MAX_TEXT, ClientMessage, ServerMessage

Check = Callable[[Any], bool]
M = TypeVar("M", ClientMessage, ServerMessage)

_MAX_DEPTH = 6
_LARGE_BYTES = 1 << 16
_MOST_PARTS = 1 << 17
_LONGEST_LIST = 1 << 12
"""msgpack makes a list as long as its head says before it reads on: a thousand heads, one in the other, of a few bytes each, must not
become gigabytes."""


class Codec(Generic[M]):
    """Encodes and decodes one direction's closed set; a code is the message's place in that set."""

    def __init__(self, messages: UnionType) -> None:
        self._classes: tuple[type[M], ...] = get_args(messages)
        self._checks = [_checks_of(cls) for cls in self._classes]
        self._codes: dict[type[Any], int] = {cls: code for code, cls in enumerate(self._classes)}

    def encode(self, message: M) -> bytes:
        packed: bytes = msgpack.packb((self._codes[type(message)], *message))
        return packed

    def decode(self, packed: bytes) -> M:
        """The message in ``packed``; raises ProtocolViolation for anything else."""
        if len(packed) > MAX_MESSAGE_BYTES:
            raise ProtocolViolation(f"a message has at most {MAX_MESSAGE_BYTES:,} bytes, this one {len(packed):,}")
        try:
            values = _unpack(packed) if len(packed) <= _LARGE_BYTES else _Counted().unpack(packed)
        except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
            raise ProtocolViolation(f"a message is msgpack: {type(error).__name__}: {str(error)[:80]}") from error
        if type(values) is not list or not values or type(values[0]) is not int or not 0 <= values[0] < len(self._classes):
            raise ProtocolViolation("a message is an array that starts with its code")
        cls, checks = self._classes[values[0]], self._checks[values[0]]
        del values[0]
        if len(values) != len(checks):
            raise ProtocolViolation(f"{cls.__name__} has {len(checks)} fields, {len(values)} came")
        for value, (name, is_valid) in zip(values, checks, strict=True):
            if not is_valid(value):
                raise ProtocolViolation(f"{cls.__name__}.{name}: {shown(value)} is out of type or range")
        made: M = cls._make(values)
        return made


def _unpack(packed: bytes) -> Any:
    return msgpack.unpackb(packed, raw=False, strict_map_key=True, max_array_len=min(len(packed), _LONGEST_LIST))


class _Counted:
    """Unpacks a large message and stops at _MOST_PARTS values: four million empty lists in one message would cost the reader seconds and
    hundreds of megabytes. What is large and meant is bytes (a publish's lanes); a smaller message can't have so many."""

    def __init__(self) -> None:
        self._left = _MOST_PARTS

    def unpack(self, packed: bytes) -> Any:
        return msgpack.unpackb(
            packed,
            raw=False,
            strict_map_key=True,
            max_array_len=_LONGEST_LIST,
            max_map_len=_LONGEST_LIST,
            list_hook=self._count,
            object_hook=self._count,
        )

    def _count(self, part: Any) -> Any:
        self._left -= len(part) + 1
        if self._left < 0:
            raise ValueError(f"more than {_MOST_PARTS:,} values")
        return part


def _checks_of(cls: type[Any]) -> list[tuple[str, Check]]:
    hints = get_type_hints(cls, include_extras=True)
    return [(name, _check_of(hints[name])) for name in cls._fields]


def _check_of(hint: Any) -> Check:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _bounded(arguments[0], arguments[1:])
    if origin is Literal:
        return lambda value: type(value) is str and value in arguments
    if origin is list:
        item = _check_of(arguments[0])
        return lambda value: type(value) is list and all(item(part) for part in value)
    if NoneType in arguments:
        (other,) = (_check_of(a) for a in arguments if a is not NoneType)
        return lambda value: value is None or other(value)
    if hint is bool:
        return lambda value: type(value) is bool
    raise TypeError(f"messages.py: no check for {hint!r}")


def _bounded(kind: Any, bounds: tuple[int, ...]) -> Check:
    if kind is int:
        low, high = bounds
        return lambda value: type(value) is int and low <= value <= high
    if kind is float:
        least, largest = bounds
        return lambda value: type(value) is float and least <= value <= largest
    (most,) = bounds
    if kind is str or kind is bytes:
        return lambda value: type(value) is kind and len(value) <= most
    return lambda value: type(value) is dict and len(value) <= most and _is_plain(value, _MAX_DEPTH)


def _is_plain(value: object, depth: int) -> bool:
    if value is None or type(value) in (bool, int, float):
        return True
    if type(value) is str:
        return len(value) <= MAX_TEXT
    if depth == 0:
        return False
    if type(value) is list:
        return all(_is_plain(part, depth - 1) for part in value)
    return type(value) is dict and all(
        type(key) is str and len(key) <= MAX_TEXT and _is_plain(part, depth - 1) for key, part in value.items()
    )


def is_text(value: str) -> bool:
    """Whether a message can hold it: Python's strings may have halves of characters, UTF-8 none."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


client_codec: Codec[ClientMessage] = Codec(ClientMessage)
"""What clients send and the server receives."""

server_codec: Codec[ServerMessage] = Codec(ServerMessage)
"""What the server sends and clients receive."""
