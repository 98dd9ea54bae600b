"""The command ``snapshot``: the window of a running server, on disk, while it goes on."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from replay_server_protocol.errors import InvalidRequest

from replay_server.exit_codes import EXIT_CODES_TEXT
from replay_server.snapshot.writer import Progress, Taken, take_snapshot

_TELL_EVERY_S = 1.0
_BACKGROUND_NICE = 10


def add_command(commands: Any, reach: Callable[[], argparse.ArgumentParser]) -> None:
    """Adds it to argparse's subparsers; ``reach`` makes the options that say which server."""
    told = "write the window of a running server to a new folder in DIR, while it goes on; `serve --restore DIR` reads it"
    snapshot = commands.add_parser("snapshot", allow_abbrev=False, help=told, epilog=EXIT_CODES_TEXT, parents=[reach()])
    snapshot.add_argument("directory", metavar="DIR", help="folder of snapshots; it is made if need be")
    snapshot.add_argument("--keep", type=int, metavar="N", help="delete all but the newest N afterwards (default: delete none)")
    snapshot.add_argument("--background", action="store_true", help="at low priority, without a word unless it fails")
    snapshot.set_defaults(run=_snapshot)


def _snapshot(options: argparse.Namespace) -> int:
    from replay_server_client.observer import Observer

    if options.keep is not None and options.keep < 1:
        raise InvalidRequest(f"--keep {options.keep}: at least 1")
    signal.signal(signal.SIGTERM, _interrupt)
    if options.background:
        os.nice(_BACKGROUND_NICE)
    tell = _Teller(is_quiet=options.background)
    with Observer.connect(options.name, run_dir=options.run_dir, name="snapshot", timeout=options.timeout) as observer:
        taken = take_snapshot(observer, Path(options.directory), keep=options.keep, tell=tell)
    if not options.background:
        print("\n".join(_lines(taken, tell.peak_bytes)))
    return 0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Teller:
    """Progress on stderr, at most once a second: over and over in one line of a terminal, else line by line."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._at_s = 0.0
        self.peak_bytes = 0

    def __call__(self, progress: Progress) -> None:
        self.peak_bytes = max(self.peak_bytes, _own_bytes())
        now_s = time.monotonic()
        if self._is_quiet or (now_s < self._at_s and progress.share < 1):
            return
        self._at_s = now_s + _TELL_EVERY_S
        rate = progress.n_bytes / max(progress.elapsed_s, 1e-9) / 1e6
        words = f"snapshot {progress.share:.0%}  {progress.done_rows:,} of {progress.rows:,} rows  {rate:,.0f} MB/s"
        is_terminal = sys.stderr.isatty()
        print(words, end="\r" if is_terminal and progress.share < 1 else "\n", file=sys.stderr, flush=True)


def _own_bytes() -> int:
    """Memory of this process alone: neither the mapped ring, nor the files of programs."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _lines(taken: Taken, peak_bytes: int) -> list[str]:
    manifest, mb = taken.manifest, taken.n_bytes / 1e6
    rows = manifest.committed - manifest.tail
    lines = [
        f"{taken.path}: {rows:,} rows, seq {manifest.tail} to {manifest.committed}",
        f"{mb:,.1f} MB in {taken.seconds:.2f} s, {mb / max(taken.seconds, 1e-9):,.0f} MB/s; peak memory {peak_bytes / 1e6:,.0f} MB",
    ]
    if manifest.left_out:
        lines.append(f"{manifest.left_out:,} older rows were overwritten before their turn to be copied; they are left out")
    return lines
