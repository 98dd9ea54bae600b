"""Exit codes of the command, and back: what a server that ended at its start had to say."""

from __future__ import annotations

from replay_server_protocol.errors import (
    AlreadyServing,
    AttachRefused,
    BudgetExceeded,
    DeviceError,
    DiskFull,
    InvalidRequest,
    ReplayError,
    ReplayTimeout,
    SchemaMismatch,
    ServerGone,
)

_CODES: dict[type[ReplayError], int] = {
    InvalidRequest: 2,
    SchemaMismatch: 2,
    AlreadyServing: 3,
    BudgetExceeded: 4,
    DiskFull: 4,
    DeviceError: 5,
    AttachRefused: 6,
    ServerGone: 7,
    ReplayTimeout: 7,
}

UNSOUND = 8
"""Of ``doctor``: something the server needs is missing here. No error has it."""

EXIT_CODES_TEXT = """exit codes: 0 done (serve: stopped in good order), 1 a fault of the server itself, 2 a wrong option or schema,
3 the name is taken, 4 not enough memory or disk, 5 the device is missing or failed, 6 refused by the server, 7 no server answered
in time, 8 the doctor found a failure"""


def exit_code_of(error: ReplayError) -> int:
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), 1)


def error_of(code: int, message: str) -> ReplayError:
    """The error of an exit code; SchemaMismatch shares that of InvalidRequest and comes back as the latter."""
    return next((kind for kind, known in _CODES.items() if known == code), ReplayError)(message)
