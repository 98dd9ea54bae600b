"""What a node sends another: publishes with what belongs to them, their rows in one array: tuples, bytes and numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from replay_server_protocol.messages import Publish

Bytes = npt.NDArray[np.uint8]


class Sender(NamedTuple):
    """The collector as it introduced itself to its forwarder; it appears at the sidecar under the same name."""

    name: str
    lanes: int
    counted: bool


class Header(NamedTuple):
    """One publish: whose, which, and its own fields (rows, masked, rejected, nonfinite, lanes, moments …) as the collector sent them."""

    origin: str
    number: int
    first: int
    sender: Sender
    publish: tuple[object, ...]
    n_bytes: int


class Answer(NamedTuple):
    """Of one call: through which number each origin is committed, the sidecar's generation, and a seq that covers those rows."""

    through: dict[str, int]
    generation: int
    committed: int


class Terms(NamedTuple):
    """What a forwarder needs to lend slots that suit the sidecar: its options, and its generation."""

    options: dict[str, object]
    generation: int


def stripped(publish: Publish) -> tuple[object, ...]:
    """The publish without what is its session's: session, generation, number, slot, origin."""
    return tuple(publish[4:15])


def dressed(header: Header, session: int, generation: int, number: int, slot: int) -> Publish:
    """The same publish as one of another session."""
    return Publish(session, generation, number, slot, *header.publish, header.origin, header.number, header.first)  # type: ignore[arg-type, call-arg]
