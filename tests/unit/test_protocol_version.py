"""The number that says who talks to whom: it rises with every change of a message, and what tells of a difference never changes."""

from __future__ import annotations

import hashlib
from typing import get_args, get_type_hints

import msgpack  # type: ignore[import-untyped]
from replay_server_protocol.codec import client_codec, server_codec
from replay_server_protocol.messages import PROTOCOL_VERSION, ClientMessage, Hello, Refused, ServerMessage

MESSAGES_OF = {2: "67cee17c47dd664e"}
"""A version's messages by a digest of their names, fields and limits. Whoever changes one makes an entry, and a row in docs/protocol.md."""


def digest() -> str:
    lines = []
    for direction in (ClientMessage, ServerMessage):
        for code, message in enumerate(get_args(direction)):
            hints = get_type_hints(message, include_extras=True)
            lines.append(f"{code} {message.__name__} " + ", ".join(f"{name}: {hints[name]!r}" for name in message._fields))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def test_no_message_changes_without_a_new_version() -> None:
    assert MESSAGES_OF.get(PROTOCOL_VERSION) == digest(), "a message changed: raise PROTOCOL_VERSION, see docs/protocol.md"


def test_hello_and_refused_keep_their_codes_and_fields_for_ever() -> None:
    hello = Hello(7, 1, "admin", "", 1, 0, 0, None, None, 0, False, 0, None)
    assert msgpack.unpackb(client_codec.encode(hello)) == [0, 7, 1, "admin", "", 1, 0, 0, None, None, 0, False, 0, None]
    assert client_codec.decode(client_codec.encode(hello)) == hello, "any version is read, so that it can be refused"
    refused = Refused(0, 1, "Hello", 0, 0, "attach_refused", "text", {})
    assert msgpack.unpackb(server_codec.encode(refused)) == [8, 0, 1, "Hello", 0, 0, "attach_refused", "text", {}]
