"""What a server that passes rows on hands to whoever carries them to the ring's server, and what the two servers must have in common."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from replay_server_protocol.messages import Publish

PASSED_OPTIONS = ("columns", "moments", "return_gamma", "finite", "nonfinite", "slot_rows")
"""Options of the ring's server that its collectors' slots and messages depend on."""


class Passed(NamedTuple):
    """Publish ``number`` of ``origin``; ``rows`` is the slot's memory, which stays as it is until the publish is committed."""

    origin: str
    number: int
    collector: str
    lanes: int
    counted: bool
    publish: Publish
    rows: npt.NDArray[np.uint8]


class Committed(NamedTuple):
    """Every publish of ``origin`` up to ``number`` is in the ring, and the seq ``committed`` covers them."""

    origin: str
    number: int
    committed: int
