"""A bounded wait: made once from a caller's timeout, asked for what is left."""

from __future__ import annotations

import math
import time
from numbers import Real

from replay_server_protocol.errors import InvalidRequest, shown


class Deadline:
    """``timeout_s`` from now (monotonic clock); None never passes."""

    def __init__(self, timeout_s: float | None) -> None:
        if timeout_s is not None and not (isinstance(timeout_s, Real) and timeout_s >= 0):
            raise InvalidRequest(f"timeout={shown(timeout_s)}: seconds, at least 0, or None")
        self.timeout_s = timeout_s
        self.started = time.monotonic()
        try:
            self._end = math.inf if timeout_s is None else self.started + timeout_s
        except OverflowError:  # an integer beyond all floats
            self._end = math.inf

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below 0; infinite for None."""
        return max(0.0, self._end - time.monotonic())

    def put_off(self, seconds: float) -> None:
        """Not all that took time was waiting."""
        self._end += seconds

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self._end
