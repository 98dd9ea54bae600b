"""What a node sends another: publishes with what belongs to them, questions for rows and rows drawn: tuples, bytes and numpy."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Asked(NamedTuple):
    """The first ``draws`` draws of a batch of ``request`` (fields of Request), for ``learner`` elsewhere.

    A batch stays lent, so that priorities can be given to its rows, until the next one of the same request and ``slot``. ``key``: the
    learner's seed, the shard's place there, and the number of the question.
    """

    learner: str
    request: dict[str, Any]
    slot: int
    draws: int
    key: tuple[int, int, int]
    alpha: float | None = None
    beta: float | None = None

    @property
    def is_plain(self) -> bool:
        """As Request has it, whose module needs torch: uniform draws of single rows."""
        asked = self.request
        return (asked["by"], asked["n_step"], asked["length"], asked["half_life_rows"]) == ("uniform", 1, 0, None)


class Drawn(NamedTuple):
    """``rows`` uint8[k * rows of a draw, stride] and ``results`` of the k draws by name, as ``BatchBuffer.results`` has them.

    Drawn from ``size_rows`` rows of ``generation``. By priority: ``mass`` of all of them, the ``least`` above 0 (inf without one), the
    exponent ``beta``, and the ``number`` under which priorities are given to these draws.
    """

    rows: Bytes
    results: dict[str, npt.NDArray[Any]]
    schema: dict[str, object]
    generation: int
    size_rows: int
    mass: float | None = None
    least: float | None = None
    beta: float = 0.0
    number: int = 0


class Priorities(NamedTuple):
    """New priorities, float32[k], of the k draws that a host answered under ``number``."""

    learner: str
    request: dict[str, Any]
    slot: int
    number: int
    generation: int
    values: npt.NDArray[np.float32]


def stripped(publish: Publish) -> tuple[object, ...]:
    """The publish without what is its session's: session, generation, number, slot, origin."""
    return tuple(publish[4:15])


def dressed(header: Header, session: int, generation: int, number: int, slot: int) -> Publish:
    """The same publish as one of another session."""
    return Publish(session, generation, number, slot, *header.publish, header.origin, header.number, header.first)  # type: ignore[arg-type, call-arg]
