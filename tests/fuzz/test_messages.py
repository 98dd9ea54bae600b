"""Messages built from the closed set, spoilt in one place, at a real server: each is acted on, refused or counted, and nothing else."""

from __future__ import annotations

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from replay_server_protocol.codec import client_codec
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.messages import MAX_MESSAGE_BYTES, Admin, Bye
from support.hostile import CODES, HEAVY, HOSTILE, MESSAGES, is_message, nested
from support.markers import MARKERS
from support.raw_client import RawCollector
from support.reports import report_of, wait_report
from support.servers import ServerProcess

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=70),
    st.binary(max_size=70),
    st.lists(st.integers(0, 3), max_size=4),
    st.dictionaries(st.text("abc", max_size=3), st.none() | st.integers(0, 9), max_size=4),
)
packed_values = values.map(msgpack.packb) | st.sampled_from(HOSTILE) | st.sampled_from(HEAVY)
kinds = st.sampled_from([kind for kind in MESSAGES if kind is not Admin])


def packed(kind: type, parts: list[bytes]) -> bytes:
    return b"\xdc" + (len(parts) + 1).to_bytes(2, "big") + bytes([CODES[kind]]) + b"".join(parts)


@st.composite
def messages(draw: st.DrawFn, head: tuple[int, int]) -> bytes:
    """A kind's number of fields; session and generation mostly right, so that what follows them is looked at."""
    kind = draw(kinds)
    n = len(kind._fields)
    parts = draw(st.lists(packed_values, min_size=n, max_size=n))
    if kind._fields[0] == "session" and draw(st.integers(0, 9)):
        parts[:2] = map(msgpack.packb, head)
    return packed(kind, parts)


def test_messages_of_the_closed_set_with_any_fields_are_acted_on_refused_or_counted(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, MARKERS, name="honest") as honest, RawCollector(server.endpoints, MARKERS, name="fuzz") as fuzz:
        malformed = 0

        @given(st.lists(messages((fuzz.welcome.session, fuzz.welcome.generation)), min_size=1, max_size=20))
        @settings(max_examples=60)
        def fire(frames: list[bytes]) -> None:
            nonlocal malformed
            for frame in frames:
                malformed += not is_message(frame)
                fuzz.socket.send(frame)

        fire()
        found = wait_report(server, lambda found: found["counters"]["bad_messages"] >= malformed)
        assert found["phase"] == "serving"
        honest.publish(1, 0, 16)
        honest.wait_credit(1)
        me = next(collector for collector in report_of(server)["collectors"] if collector["name"] == "honest")
        assert (me["published_rows"], me["committed_rows"], me["rejected_rows"]) == (16, 16, 0)


@pytest.mark.parametrize("depth", [30, 500, 990, 1000, 1020, 1030, 100_000])
@pytest.mark.parametrize("opens", [b"\x91", b"\x81\xa1a", b"\xdc\x10\x00", b"\xdd\x00\x10\x00\x00"])
def test_nesting_of_any_depth_is_a_violation_that_names_it(depth: int, opens: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        client_codec.decode(packed(Bye, [nested(depth, opens), b"\x01"]))


@given(packed_values, packed_values)
@example(b"\xdd\x00\x3f\xff\x00" + b"\x90" * 0x3FFF00, b"\x01")
@example(b"\xdc\x10\x00" * (MAX_MESSAGE_BYTES // 3 - 10), b"\x01")
@example(b"\xdd\x00\x3f\xff\x00" * (MAX_MESSAGE_BYTES // 5 - 10), b"\x01")
@example(b"\xdb\x00\x3f\xff\x00" + b"x" * 0x3FFF00, b"\x01")
def test_any_two_values_are_a_bye_or_a_violation(session: bytes, generation: bytes) -> None:
    is_message(packed(Bye, [session, generation]))
