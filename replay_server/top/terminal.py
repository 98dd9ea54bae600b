"""The loop of ``top``: asks for a report, shows it, looks at the keyboard. All that waits or touches the terminal is here."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from replay_server_client.status import query
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import InvalidRequest, ProtocolViolation, ServerGone

from replay_server.top.plain import line
from replay_server.top.watch import View, Watch

_ANSWER_WITHIN_S = 0.5
_LEAVE_KEYS = b"qQ"


def run(endpoints: Endpoints, interval_s: float) -> int:
    """Shows reports every ``interval_s`` seconds until q, Ctrl-C or SIGTERM; waits for a server that is not there. Returns 0.

    Raises ServerGone for one that a script spawned and that has ended: its name and its run directory never come again.
    On a terminal it is a picture, and needs rich (InvalidRequest says how to get it); elsewhere a line a report.
    """
    try:
        with _ended_by_signals():
            if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
                _on_terminal(endpoints, interval_s)
            else:
                _in_lines(endpoints, interval_s)
    except KeyboardInterrupt:
        pass
    return 0


def _in_lines(endpoints: Endpoints, interval_s: float) -> None:
    watch, told = Watch(endpoints.name), 0
    while True:
        view = _look(watch, endpoints)
        for event in view.events[max(0, len(view.events) - (view.happened - told)) :]:
            print(f"{event.clock} {event.words}")
        told = view.happened
        print(line(view, _clock()), flush=True)
        time.sleep(interval_s)


def _on_terminal(endpoints: Endpoints, interval_s: float) -> None:
    try:
        from rich.console import Console
        from rich.live import Live

        from replay_server.top.picture import Picture
    except ImportError as error:
        raise InvalidRequest(
            f"top draws with rich, which is not installed ({error}): pip install 'replay-server[top]', or pipe its output: | cat"
        ) from error
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? for a bar, and goes on
    watch = Watch(endpoints.name)
    with _keys() as is_left, Live(console=Console(), screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while True:
            live.update(Picture(_look(watch, endpoints), fits_screen=True), refresh=True)
            if is_left(interval_s):
                return


def _look(watch: Watch, endpoints: Endpoints) -> View:
    try:
        report = query(endpoints, _ANSWER_WITHIN_S)
    except ServerGone:
        if endpoints.is_spawned and not endpoints.run_dir.exists():
            raise
        return watch.miss(f"no server named {endpoints.name} in {endpoints.run_dir}", time.monotonic(), _clock())
    except ProtocolViolation as error:
        return watch.miss(str(error), time.monotonic(), _clock())
    return watch.take(report, time.monotonic(), _clock())


def _clock() -> str:
    return time.strftime("%H:%M:%S")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end it like Ctrl-C, so that the terminal is given back."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]  # nohup stays
    kept = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yields a wait of so many seconds, True if a key to leave came. The keyboard echoes nothing meanwhile and is as before afterwards.

    Ctrl-Z is left out: a stopped top would keep the alternate screen.
    """
    if not sys.stdin.isatty():
        yield _wait
        return
    import termios

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    quiet = termios.tcgetattr(keyboard)
    quiet[3] &= ~(termios.ICANON | termios.ECHO)
    quiet[6][termios.VSUSP] = b"\0"
    termios.tcsetattr(keyboard, termios.TCSADRAIN, quiet)
    try:
        yield lambda seconds: _is_left(keyboard, time.monotonic() + seconds)
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _is_left(keyboard: int, until_s: float) -> bool:
    while (left_s := until_s - time.monotonic()) > 0:
        if select.select([keyboard], [], [], left_s)[0]:
            typed = os.read(keyboard, 64)
            if not typed or any(key in _LEAVE_KEYS for key in typed):  # nothing: the terminal is gone
                return True
    return False
