"""The commands ``set`` and ``stop``, and the line in which each says what it has done."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import ServerGone

_LOOK_AGAIN_S = 0.02
_NAMES = {"samples_per_insert_target": "samples_per_insert", "tolerance_rows": "tolerance"}


def add_commands(commands: Any, reach: Callable[[], argparse.ArgumentParser]) -> None:
    set_ = commands.add_parser(
        "set", allow_abbrev=False, help="change samples-per-insert or tolerance of a running server", parents=[reach()]
    )
    set_.add_argument("key", metavar="KEY")
    set_.add_argument("value", metavar="VALUE")
    set_.set_defaults(run=_set)

    stop = commands.add_parser("stop", allow_abbrev=False, help="stop a running server in good order", parents=[reach()])
    stop.set_defaults(run=_stop)


def _set(options: argparse.Namespace) -> int:
    from replay_server_client.admin import Admin

    with Admin.connect(options.name, run_dir=options.run_dir, timeout=options.timeout) as admin:
        endpoints = Endpoints.resolve(options.name, options.run_dir)
        before = _flow(endpoints, options.timeout)
        admin.set(options.key, options.value, timeout=options.timeout)
        after = _flow(endpoints, options.timeout)
    print(_changes(before, after) or f"{options.key.replace('-', '_')} {options.value}")
    return 0


def _stop(options: argparse.Namespace) -> int:
    from replay_server_client.admin import Admin

    endpoints = Endpoints.resolve(options.name, options.run_dir)
    with Admin.connect(options.name, run_dir=options.run_dir, timeout=options.timeout) as admin:
        admin.stop(timeout=options.timeout)
    until_s = time.monotonic() + options.timeout
    while endpoints.lock_path.exists():  # its clients have some time to detach
        if time.monotonic() >= until_s:
            print(f"{endpoints.name!r} was told to stop, and has not ended yet")
            return 0
        time.sleep(_LOOK_AGAIN_S)
    print(f"{endpoints.name!r} has stopped")
    return 0


def _flow(endpoints: Endpoints, timeout_s: float) -> Mapping[str, Any]:
    """What the server reports of flow control; empty if it has no time to."""
    from replay_server_client.status import query

    with contextlib.suppress(ServerGone):
        report: Mapping[str, Any] = query(endpoints, timeout_s)
        found: Mapping[str, Any] = report["flow"]
        return found
    return {}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """``samples_per_insert 8 (was none), tolerance 8,192 (was 0)``; empty where nothing has changed."""
    changed = [key for key in _NAMES if key in before and key in after and before[key] != after[key]]
    return ", ".join(f"{_NAMES[key]} {_text(after[key])} (was {_text(before[key])})" for key in changed)


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:,}".removesuffix(".0")
