"""The command ``load``: rows of a file into a running server's ring, outside flow control."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.schema import Schema

from replay_server.exit_codes import EXIT_CODES_TEXT
from replay_server.saved.offline import open_arrays
from replay_server.saved.transitions import Transitions

_BLOCK_BYTES = 4 << 20
_MOST_BLOCK_ROWS = 1 << 16
_ROWS_WITHIN_S = 60.0


def add_command(commands: Any, reach: Callable[[], argparse.ArgumentParser]) -> None:
    """Adds it to argparse's subparsers; ``reach`` makes the options that say which server."""
    told = "write the rows of FILE.npz or FILE.safetensors to a running server, outside flow control"
    load = commands.add_parser("load", allow_abbrev=False, help=told, epilog=EXIT_CODES_TEXT, parents=[reach()])
    load.add_argument("file", metavar="FILE", help="arrays of rows by field; names of Minari and D4RL are understood")
    load.set_defaults(run=_load)


def _load(options: argparse.Namespace) -> int:
    begin_s, path = time.monotonic(), Path(options.file)
    schema = _ring_schema(options)
    with open_arrays(path) as file:
        needs_next = "obs" in schema.pairs if schema is not None else any(name.partition(".")[0] == "obs" for name in file.arrays)
        has_ends = any(name in file.arrays for name in ("terminated", "truncated"))
        transitions = Transitions(file, path, has_next=needs_next and has_ends)
        schema = schema or Schema.of(transitions.fields)
        _check_fields(schema, transitions, path)
        rows = _write(options, schema, transitions)
    seconds = time.monotonic() - begin_s
    print(f"{rows:,} rows of {path} in the ring after {seconds:.2f} s, {rows * schema.stride / max(seconds, 1e-9) / 1e6:,.0f} MB/s")
    if transitions.left_out:
        print(f"{transitions.left_out:,} rows without a next observation are left out")
    return 0


def _ring_schema(options: argparse.Namespace) -> Schema | None:
    """The running ring's schema; None where this file's first row will make the ring."""
    from replay_server_client.observer import Observer
    from replay_server_client.status import query

    if query(Endpoints.resolve(options.name, options.run_dir), options.timeout)["schema"] is None:
        return None
    with Observer.connect(options.name, run_dir=options.run_dir, name="load", timeout=options.timeout) as observer:
        return observer.schema(options.timeout)


def _check_fields(schema: Schema, transitions: Transitions, path: Path) -> None:
    """Raises InvalidRequest naming what the ring has and the file lacks, or the reverse."""
    missing = [name for name in schema.names if name not in transitions.fields]
    extra = [name for name in transitions.fields if name not in schema.names]
    if missing or extra:
        words = [f"it lacks {', '.join(missing)}"] * bool(missing) + [f"the ring has no field for {', '.join(extra)}"] * bool(extra)
        raise InvalidRequest(f"{path} doesn't fit the ring: {'; '.join(words)}")


def _write(options: argparse.Namespace, schema: Schema, transitions: Transitions) -> int:
    from replay_server_client.collector import Collector

    block_rows = max(1, min(_BLOCK_BYTES // schema.stride, _MOST_BLOCK_ROWS))
    rows = 0
    reach: dict[str, Any] = {"run_dir": options.run_dir, "timeout": options.timeout, "name": "load"}
    with Collector.connect(options.name, schema=schema, counted=False, **reach) as collector:
        for run, is_cut in transitions.runs(block_rows):
            if is_cut:
                collector.cut(0)
            n = len(next(iter(run.values())))
            collector.write(run, timeout=_ROWS_WITHIN_S)
            rows += n
        collector.flush(timeout=_ROWS_WITHIN_S)
    return rows
