"""Every message round trips; everything else is a ProtocolViolation and nothing more."""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from replay_server_protocol.codec import Codec, client_codec, server_codec
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import (
    MAX_MESSAGE_BYTES,
    MAX_TEXT,
    Bye,
    ClientMessage,
    Credit,
    Explain,
    Mapped,
    Proof,
    Publish,
    Reason,
    Refused,
    Release,
    SegmentLent,
    ServerMessage,
)
from replay_server_protocol.schema import MAX_FIELDS, Schema

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=64)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Every value that an annotation of messages.py allows."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if NoneType in arguments:
        return st.none() | values_of(next(a for a in arguments if a is not NoneType))
    if hint is bool:
        return st.booleans()
    assert origin is Annotated, hint
    kind, *bounds = arguments
    if kind is int:
        return st.integers(*bounds) | st.sampled_from(bounds)
    if kind is float:
        return st.floats(*bounds)
    if kind is str:
        return texts
    if kind is bytes:
        return st.binary(max_size=64)
    return st.dictionaries(texts, plain, max_size=4)


def messages_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls, include_extras=True)
    return st.builds(cls, *(values_of(hints[name]) for name in cls._fields))


client_messages = st.one_of([messages_of(cls) for cls in get_args(ClientMessage)])
server_messages = st.one_of([messages_of(cls) for cls in get_args(ServerMessage)])
DIRECTIONS = [pytest.param(client_codec, client_messages, id="client"), pytest.param(server_codec, server_messages, id="server")]

PUBLISH = Publish(1, 2, 3, 0, 16, 0, 0, 0, b"", [b"m"])


def is_refused(codec: Codec[Any], packed: bytes) -> bool:
    """True if refused as a violation, False if accepted as a message; any other exception fails the test."""
    try:
        message = codec.decode(packed)
    except ProtocolViolation:
        return True
    assert codec.decode(codec.encode(message)) == message or "nan" in repr(message)
    return False


@pytest.mark.parametrize("cls", [*get_args(ClientMessage), *get_args(ServerMessage)])
def test_every_message_round_trips(cls: type[Any]) -> None:
    codec: Codec[Any] = client_codec if cls in get_args(ClientMessage) else server_codec

    @settings(max_examples=40)
    @given(messages_of(cls))
    def round_trips(message: Any) -> None:
        again = codec.decode(codec.encode(message))
        assert again == message
        assert type(again) is cls

    round_trips()


@given(st.data(), client_messages | server_messages)
def test_field_of_a_wrong_type_is_refused_by_name(data: st.DataObject, message: Any) -> None:
    codec: Codec[Any] = client_codec if type(message) in get_args(ClientMessage) else server_codec
    place = data.draw(st.integers(0, len(message) - 1))
    values = msgpack.unpackb(codec.encode(message))
    values[place + 1] = data.draw(st.sampled_from([1.5, msgpack.ExtType(1, b"x"), msgpack.Timestamp(1), -(2**63) - 0.0]))
    with pytest.raises(ProtocolViolation, match=f"{type(message).__name__}.{message._fields[place]}"):
        codec.decode(msgpack.packb(values))


@pytest.mark.parametrize(("codec", "messages"), DIRECTIONS)
def test_every_truncation_is_refused(codec: Codec[Any], messages: st.SearchStrategy[Any]) -> None:
    @given(messages, st.data())
    def is_refused_short(message: Any, data: st.DataObject) -> None:
        packed = codec.encode(message)
        assert is_refused(codec, packed[: data.draw(st.integers(0, len(packed) - 1))])

    is_refused_short()


@pytest.mark.parametrize(("codec", "messages"), DIRECTIONS)
def test_mutated_bytes_are_a_message_or_a_violation(codec: Codec[Any], messages: st.SearchStrategy[Any]) -> None:
    @given(messages, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
    def survives(message: Any, changes: list[tuple[int, int]]) -> None:
        packed = bytearray(codec.encode(message))
        for place, byte in changes:
            packed[place % len(packed)] = byte
        is_refused(codec, bytes(packed))

    survives()


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x90")
@example(b"\x91" * 2000)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(msgpack.packb([0, {1: 2}]))
@example(msgpack.packb({"a": 1}))
@example(msgpack.packb([True]))
@example(msgpack.packb([-1]))
@example(msgpack.packb([2**63]))
@example(msgpack.packb([0]) + b"\x00")
@example(b"\xd6\xff\xff\xff\xff\xff")
def test_random_bytes_are_refused_unless_they_spell_a_message(packed: bytes) -> None:
    assert is_refused(client_codec, packed) or spells_what_it_decodes_to(client_codec, packed)


@given(plain)
@example([4, 1, 1])  # a whole CHALLENGE, by chance
def test_other_msgpack_is_refused_unless_it_spells_a_message(value: object) -> None:
    packed = msgpack.packb(value)
    assert is_refused(server_codec, packed) or spells_what_it_decodes_to(server_codec, packed)


def spells_what_it_decodes_to(codec: Codec[Any], packed: bytes) -> bool:
    """Nothing was added, dropped or changed on the way in: these values are a message's own."""
    again = msgpack.unpackb(codec.encode(codec.decode(packed)))
    return bool(again == msgpack.unpackb(packed))


def repacked(message: Any, **changes: object) -> bytes:
    """The message as the other side would send it with fields out of range."""
    codec: Codec[Any] = client_codec if type(message) in get_args(ClientMessage) else server_codec
    values = msgpack.unpackb(codec.encode(message))
    for place, field in enumerate(message._fields):
        values[place + 1] = changes.get(field, values[place + 1])
    packed: bytes = msgpack.packb(values)
    return packed


REFUSED = Refused(0, 1, "HELLO", 0, 0, "attach_refused", "no", {})


@pytest.mark.parametrize(
    ("codec", "message", "name", "value"),
    [
        (client_codec, PUBLISH, "session", 0),
        (client_codec, PUBLISH, "number", 2**63),
        (client_codec, PUBLISH, "rows", -1),
        (client_codec, PUBLISH, "rows", True),
        (client_codec, PUBLISH, "lanes", "text"),
        (client_codec, PUBLISH, "moments", [b"ok", "text"]),
        (client_codec, PUBLISH, "moments", {}),
        (client_codec, Proof(1, 1, 1, b"x"), "step", 3),
        (client_codec, Proof(1, 1, 1, b"x"), "pattern", b"x" * 65),
        (client_codec, Release(1, 1, 1, True), "is_used", 1),
        (client_codec, Explain(1, 1, "ring", 0, 0), "what", "rings"),
        (client_codec, Explain(1, 1, "ring", 0, 0), "what", None),
        (server_codec, Reason(1, 1, "ring", "x"), "text", "x" * (MAX_TEXT + 1)),
        (server_codec, REFUSED, "code", "x" * 65),
        (server_codec, REFUSED, "details", {f"k{i}": 0 for i in range(65)}),
        (server_codec, REFUSED, "details", {"a": b"bytes"}),
        (server_codec, REFUSED, "details", {"a": [[[[[[[[1]]]]]]]]}),
        (server_codec, REFUSED, "details", {"a": "x" * (MAX_TEXT + 1)}),
        (server_codec, REFUSED, "details", []),
    ],
)
def test_value_beyond_its_limit_is_refused_by_message_and_field(codec: Codec[Any], message: Any, name: str, value: object) -> None:
    with pytest.raises(ProtocolViolation, match=f"^{type(message).__name__}.{name}: "):
        codec.decode(repacked(message, **{name: value}))


@pytest.mark.parametrize("change", [-1, +1])
def test_wrong_number_of_fields_is_refused_with_both_numbers(change: int) -> None:
    values = msgpack.unpackb(client_codec.encode(Mapped(1, 2, 0)))
    values = values[:change] if change < 0 else [*values, 1]
    with pytest.raises(ProtocolViolation, match=f"Mapped has 3 fields, {3 + change} came"):
        client_codec.decode(msgpack.packb(values))


def test_message_over_the_size_limit_is_refused_unread() -> None:
    with pytest.raises(ProtocolViolation, match=r"at most 4,194,304 bytes, this one 4,194,305"):
        client_codec.decode(b"\xff" * (MAX_MESSAGE_BYTES + 1))


def test_the_other_directions_codes_mean_other_messages() -> None:
    packed = server_codec.encode(Credit(1, 1, 1, 1))
    assert is_refused(client_codec, packed)


def test_largest_schema_fits_in_a_message() -> None:
    schema = Schema.of({f"part{i:03}.{'n' * 56}": ("float32", (1,) * 8) for i in range(MAX_FIELDS)})
    lent = SegmentLent(1, 1, "replay-x", 2, 512, 4096, schema.to_wire(), [], "reject", False)
    decoded = server_codec.decode(server_codec.encode(lent))
    assert isinstance(decoded, SegmentLent)
    assert Schema.from_wire(decoded.schema) == schema


def test_wire_bytes_are_fixed() -> None:
    assert client_codec.encode(Bye(5, 7)) == bytes([0x93, 13, 5, 7])
    packed = bytes([0xDC, 0, 19, 2, 1, 2, 3, 0, 16, 0, 0, 0, 0xC4, 0, 0x91, 0xC4, 1]) + b"m"
    packed += bytes([0xC4, 0, 0xC4, 0, 0xA0, 0xA0, 0, 0xA0, 0, 0])
    assert client_codec.encode(PUBLISH) == packed
    assert tuple(client_codec.decode(bytes([0x93, 13, 5, 7]))) == (5, 7)
