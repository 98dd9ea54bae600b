"""Messages that an honest client never sends: spoilt real ones, nearly valid ones, nonsense. All from one seed, some 20,000 a second."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import msgpack  # type: ignore[import-untyped]
from replay_server_protocol.codec import client_codec
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import (
    Admin,
    Cancel,
    ClientMessage,
    Explain,
    Hello,
    MailAsk,
    MailPost,
    MailReturn,
    MailWritten,
    Mapped,
    Proof,
    Publish,
    Release,
    Sample,
    Unused,
)
from replay_server_protocol.schema import Schema

Frames = tuple[bytes, ...]

MESSAGES: tuple[type[Any], ...] = get_args(ClientMessage)
CODES = {cls: code for code, cls in enumerate(MESSAGES)}
COUNTS = (0, 1, 2, 3, 15, 16, 17, 2**16, 2**31, 2**32, 2**62, 2**63 - 1)
"""Valid where a count is."""


def nested(depth: int, opens: bytes = b"\x91") -> bytes:
    """A value ``depth`` deep, as bytes: msgpack's own packer refuses depths that its reader takes."""
    return opens * depth + b"\x01"


_WRONG: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    -(2**63),
    2**63,
    2**64 - 1,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 65,
    "x" * 5000,
    "\x00\n\x1b[2J",
    "ring",
    b"",
    b"x" * 65,
    b"\xff" * 100,
    [],
    [[]],
    [1] * 300,
    {},
    {"a": {"b": [1, "x" * 5000]}},
    {"fields": [["mark", "int64", [2**62] * 8]]},
    {"fields": [["x" * 4000, "int65", []]] * 3},
    msgpack.ExtType(5, b"x" * 20),
    msgpack.Timestamp(1, 5),
    {1: 2},
)
HOSTILE: tuple[bytes, ...] = (
    *map(msgpack.packb, _WRONG),
    nested(30),
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xa4\xff\xfe\xfd\xfc",
    b"\xd6\xff\xff\xff\xff\xff",
    b"\xc7\x0c\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
)
"""Packed values that stand in for a field: wrong type, out of range, too long, too deep, no msgpack at all."""
HEAVY: tuple[bytes, ...] = (
    nested(990),
    nested(1010),
    nested(1010, b"\x81\xa1a"),
    nested(5000),
    b"\xdc\x10\x00" + b"\x90" * 2**12,
    b"\xdc\x10\x00" * 2000,
    msgpack.packb({str(key): key for key in range(600)}),
)
"""Those that cost a reader some milliseconds: one in _HEAVY_ONE_IN."""
_HEAVY_ONE_IN = 100


def honest_messages(rng: random.Random, session: int, generation: int, schema: Schema) -> list[Any]:
    """One well-formed message of each kind; none of them stops a server or changes how it serves others."""
    head, wire = (session, generation), schema.to_wire()

    def count() -> int:
        return rng.choice(COUNTS)

    return [
        Hello(
            rng.choice((1, 1, 2)),
            rng.getrandbits(62) + 1,
            rng.choice(("collector", "learner")),
            "fuzz",
            0,
            0,
            0,
            None,
            wire,
            1,
            True,
            0,
            None,
        ),
        Mapped(*head),
        Publish(*head, max(1, count()), count(), count(), 0, 0, 0, rng.randbytes(rng.choice((0, 4, 64))), [b"x" * 40]),
        Proof(*head, rng.choice((1, 2)), rng.randbytes(rng.choice((0, 63, 64)))),
        Sample(
            *head, rng.randrange(3), 1 + rng.randrange(10_000), rng.choice((1, 16, 2**62)), rng.choice((0, 0, 2**62)), rng.choice((None, 1))
        ),
        Release(*head, 1 + rng.randrange(100_000), rng.random() < 0.5),
        Cancel(*head, rng.randrange(3), 1 + rng.randrange(10_000)),
        Explain(*head, rng.choice(("ring", "credit", "sample")), count(), count()),
        MailPost(*head, 1 + rng.randrange(9), f"box{rng.randrange(80)}", rng.choice((0, 1, 4096, 2**62)), {"arrays": []}),
        MailWritten(*head, 1 + rng.randrange(9)),
        MailAsk(*head, f"box{rng.randrange(80)}", rng.choice((0, 0, 1, 2**62))),
        MailReturn(*head, f"box{rng.randrange(80)}", 1 + rng.randrange(9)),
        Admin(
            *head, 1, "set", rng.choice(("", "tolerance", "samples-per-insert", "x" * 64)), rng.choice(("nan", "-1", "1e999", "9" * 4000))
        ),
        Unused(*head, rng.choice((1, 2**62))),
    ]


class Hostile:
    """An endless stream of messages of one session (or of none that exists); ``malformed`` counts those that the codec refuses."""

    def __init__(self, seed: int, session: int, generation: int, schema: Schema) -> None:
        self.malformed = self.well_formed = 0
        self._rng = rng = random.Random(seed)
        honest = [message for _ in range(20) for message in honest_messages(rng, session, generation, schema)]
        self._values: Sequence[tuple[int, list[bytes]]] = [(CODES[type(m)], [msgpack.packb(v) for v in m]) for m in honest]
        self._packed = [client_codec.encode(message) for message in honest]
        self._ways: tuple[tuple[Callable[[], Frames], int], ...] = (
            (self._spoilt_bytes, 40),
            (self._one_wrong_field, 40),
            (self._well_formed, 14),
            (self._nonsense, 3),
            (self._wrong_frames, 3),
        )

    def __iter__(self) -> Iterator[Frames]:
        ways, weights = zip(*self._ways, strict=True)
        while True:
            for way in self._rng.choices(ways, weights, k=256):
                frames = way()
                if len(frames) == 1 and is_message(frames[0]):
                    self.well_formed += 1
                else:
                    self.malformed += 1
                yield frames

    def _spoilt_bytes(self) -> Frames:
        return (spoil(self._rng, bytearray(self._rng.choice(self._packed)), self._packed),)

    def _one_wrong_field(self) -> Frames:
        rng = self._rng
        code, values = rng.choice(self._values)
        place, wrong = rng.randrange(len(values)), rng.choice(HOSTILE if rng.randrange(_HEAVY_ONE_IN) else HEAVY)
        return (b"\xdc" + (len(values) + 1).to_bytes(2, "big") + bytes([code]) + b"".join((*values[:place], wrong, *values[place + 1 :])),)

    def _well_formed(self) -> Frames:
        return (self._rng.choice(self._packed),)

    def _nonsense(self) -> Frames:
        rng = self._rng
        return (rng.choice((b"", b"status", rng.randbytes(rng.randrange(64)), rng.choice(HOSTILE))),)

    def _wrong_frames(self) -> Frames:
        rng = self._rng
        frames = rng.choices((b"", b"x", rng.choice(self._packed)), k=rng.choice((2, 2, 3, 10, 100)))
        return tuple(frames)


def spoil(rng: random.Random, packed: bytearray, others: Sequence[bytes]) -> bytes:
    """Flips, cuts, inserts and splices, one to four times."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(packed) + 1)
        match rng.randrange(5):
            case 0 if packed:
                packed[at % len(packed)] ^= 1 << rng.randrange(8)
            case 1 if packed:
                packed[at % len(packed)] = rng.randrange(256)
            case 2:
                del packed[at : at + rng.choice((1, 1, 2, 8, 1000))]
            case 3:
                packed[at:at] = rng.randbytes(rng.choice((1, 2, 4, 64)))
            case _:
                other = rng.choice(others)
                packed[at:] = other[rng.randrange(len(other)) :]
    return bytes(packed)


def is_message(packed: bytes) -> bool:
    try:
        client_codec.decode(packed)
    except ProtocolViolation:
        return False
    return True
