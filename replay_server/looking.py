"""The commands ``peek`` and ``dump``: rows of a running server, in the terminal or in a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, TypedDict

from replay_server_protocol.errors import InvalidRequest

from replay_server.exit_codes import EXIT_CODES_TEXT
from replay_server.row_files import check_file, write_rows
from replay_server.row_text import json_lines, text_lines

_NEWEST = 10
_MOST_SEQS = 1 << 24
_COPIED_WITHIN_S = 600.0


class _Chosen(TypedDict):
    newest: int | None
    seqs: list[int] | None
    episode_of: int | None
    fields: list[str] | None
    timeout: float


def add_commands(commands: Any, reach: Callable[[], argparse.ArgumentParser]) -> None:
    """Adds both to argparse's subparsers; ``reach`` makes the options that say which server."""
    peek_help = "print rows of a running server (the newest 10), counting nowhere"
    peek = commands.add_parser("peek", allow_abbrev=False, help=peek_help, epilog=EXIT_CODES_TEXT, parents=[reach(), _choice()])
    peek.add_argument("--json", action="store_true", help="one JSON object a row")
    peek.set_defaults(run=_peek)
    dump_help = "write rows of a running server (its whole window) to FILE.npz or FILE.safetensors, counting nowhere"
    dump = commands.add_parser("dump", allow_abbrev=False, help=dump_help, epilog=EXIT_CODES_TEXT, parents=[reach(), _choice()])
    dump.add_argument("file", metavar="FILE", help="ends in .npz or .safetensors")
    dump.set_defaults(run=_dump)


def _choice() -> argparse.ArgumentParser:
    choice = argparse.ArgumentParser(add_help=False)
    which = choice.add_mutually_exclusive_group()
    which.add_argument("--newest", type=int, metavar="K", help="the last K rows")
    which.add_argument("--seqs", metavar="SEQ,FROM-TO,…", help="these rows; a range has both its ends")
    which.add_argument("--episode-of", type=int, metavar="SEQ", help="the episode of that row (serve --columns link)")
    choice.add_argument("--fields", metavar="FIELD,…", help="these fields alone")
    return choice


def _peek(options: argparse.Namespace) -> int:
    from replay_server_client.observer import Observer

    chosen = _chosen(options, _NEWEST)
    with Observer.connect(options.name, run_dir=options.run_dir, name="peek", timeout=options.timeout) as observer:
        schema = observer.schema(options.timeout)
        rows = observer.read(**chosen)
    lines = json_lines if options.json else text_lines
    for line in lines(rows.seqs, rows.fields, schema):
        print(line)
    if not options.json and not len(rows):
        print(f"no rows: the window is [{rows.window[0]}, {rows.window[1]})")
    _tell_overtaken(len(rows.overtaken))
    return 0


def _dump(options: argparse.Namespace) -> int:
    from replay_server_client.observer import Observer

    check_file(options.file)
    chosen = _chosen(options, 2**62)
    with Observer.connect(options.name, run_dir=options.run_dir, name="dump", timeout=options.timeout) as observer:
        schema = observer.schema(options.timeout)
        rows = observer.read(**chosen)
    write_rows(options.file, rows.seqs, rows.fields, schema)
    print(f"{len(rows):,} rows of the window [{rows.window[0]}, {rows.window[1]}) in {options.file}")
    _tell_overtaken(len(rows.overtaken))
    return 0


def _tell_overtaken(n: int) -> None:
    if n:
        print(f"replay-server: {n:,} rows were overwritten before their turn to be copied; they are left out", file=sys.stderr)


def _chosen(options: argparse.Namespace, newest: int) -> _Chosen:
    is_chosen = options.seqs is not None or options.episode_of is not None
    return {
        "newest": None if is_chosen else newest if options.newest is None else options.newest,
        "seqs": None if options.seqs is None else _seqs(options.seqs),
        "episode_of": options.episode_of,
        "fields": None if options.fields is None else [name for name in options.fields.split(",") if name],
        "timeout": max(options.timeout, _COPIED_WITHIN_S),
    }


def _seqs(text: str) -> list[int]:
    """The numbers of ``5,7,100-120``."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            begin, end = int(first), int(last if dash else first)
            if not 0 <= begin <= end or len(found) + end - begin >= _MOST_SEQS:
                raise ValueError(part)
            found += range(begin, end + 1)
    except ValueError as error:
        raise InvalidRequest(f"--seqs {text!r}: numbers and ranges like 5,7,100-120, at most {_MOST_SEQS:,} rows") from error
    return found
