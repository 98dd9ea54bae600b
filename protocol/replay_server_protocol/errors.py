"""Every error of the product: one base, and each class says whose fault it is.

An error crosses the wire as its ``code``, its message and a flat map of details, and comes out on the other side as the same
class. A class without a row in ``by_code`` cannot be sent.
"""

from __future__ import annotations

import reprlib
from typing import ClassVar

Detail = int | float | str | bool | None

_SHOWN = 80
_WIDEST_BITS = 128


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = _SHOWN

    def repr_int(self, x: int, level: int) -> str:  # Python refuses to print one of more than 4,300 digits
        return repr(x) if x.bit_length() <= _WIDEST_BITS else f"an integer of {x.bit_length():,} bits"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x) if len(x) <= _SHOWN // 4 else f"{x[: _SHOWN // 4]!r}… ({len(x):,} bytes)"

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        return super().repr_dict(x, level) if len(x) <= _SHOWN else f"a dict of {len(x):,} keys"


def shown(value: object) -> str:
    """``value`` as a message shows it: its ``repr``, cut short. Costs little and never raises, whatever came (deep, huge, hostile)."""
    try:
        text = _Shown().repr(value)
    except Exception:  # noqa: BLE001  a foreign __repr__ may raise anything
        return f"<{type(value).__name__}>"
    return text if len(text) <= 2 * _SHOWN else f"{text[: 2 * _SHOWN]}…"


class ReplayError(Exception):
    """Base of all errors raised by the client and the server.

    ``details`` holds the numbers of the message (``needed_bytes``, ``rows`` …) for programs that act on them. ``rows_written`` says how
    many leading rows of a ``write`` are in; the rest may be written again.
    """

    code: ClassVar[str] = "replay_error"

    def __init__(self, message: str, **details: Detail) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    @property
    def rows_written(self) -> int:
        rows = self.details.get("rows_written")
        return rows if isinstance(rows, int) else 0


class ReplayTimeout(ReplayError, TimeoutError):
    """A wait ran out; the message names what was missing and who was late."""

    code = "timeout"


class ServerGone(ReplayError, ConnectionError):
    """The server ended or restarted; the client attaches again on its next call."""

    code = "server_gone"


class ServerClosing(ServerGone):
    """The server said that it stops in good order."""

    code = "server_closing"


class ShardLost(ServerGone):
    """A shard that took part is gone, and sampling may not (``on_loss="raise"``) or can not go on without it; details: ``shard``."""

    code = "shard_lost"


class AttachRefused(ReplayError):
    """The server or the client itself refused a session (clock, device, name, run, limit); the message names the remedy."""

    code = "attach_refused"


class SchemaMismatch(ReplayError, ValueError):
    """Two schemas differ, or a schema is not a valid one; the message names the field."""

    code = "schema_mismatch"


class BudgetExceeded(ReplayError):
    """Memory was refused before it was taken; details: ``needed_bytes``, ``free_bytes``, ``fits_rows``."""

    code = "budget_exceeded"


class ProtocolViolation(ReplayError):
    """The other side broke the protocol: a malformed message, or one that is not allowed now."""

    code = "protocol_violation"


class RowsRejected(ReplayError, ValueError):
    """Rows given to ``write`` don't fit the schema; the message names the field and what would be right."""

    code = "rows_rejected"


class InvalidRequest(ReplayError, ValueError):
    """An argument or option is wrong, or the request could never be met; the message gives both numbers."""

    code = "invalid_request"


class DiskFull(ReplayError):
    """A file was not written: there is no space left for it. Nothing else is harmed, and an earlier file of its name is as it was."""

    code = "disk_full"


class ForkedClient(ReplayError):
    """A client made before ``fork`` was used in the child; connect again there."""

    code = "forked_client"


class DeviceError(ReplayError):
    """A CUDA call failed, or the device asked for isn't there; the message names the call and the remedy."""

    code = "device_error"


class AlreadyServing(ReplayError):
    """Another living server holds this name in this run directory."""

    code = "already_serving"


by_code: dict[str, type[ReplayError]] = {
    cls.code: cls
    for cls in (
        ReplayError,
        ReplayTimeout,
        ServerGone,
        ServerClosing,
        ShardLost,
        AttachRefused,
        SchemaMismatch,
        BudgetExceeded,
        ProtocolViolation,
        RowsRejected,
        InvalidRequest,
        DiskFull,
        ForkedClient,
        DeviceError,
        AlreadyServing,
    )
}
