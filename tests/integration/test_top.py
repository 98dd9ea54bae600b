"""The real ``replay-server top`` beside a real server: on a pseudo-terminal, and into a pipe."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_server_client import Collector
from support.markers import MARKERS, marker_steps
from support.processes import Children
from support.servers import ServerProcess
from support.terminal import Terminal

from replay_server import ReplayServer

OPENED, CLOSED, CURSOR_SHOWN = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


def top(name: str, run_dir: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "replay_server", "top", "--name", name, "--run-dir", str(run_dir), "--interval", "0.1", *options]


def assert_terminal_given_back(terminal: Terminal) -> None:
    assert terminal.output.rindex(CLOSED) > terminal.output.rindex(OPENED)
    assert CURSOR_SHOWN in terminal.output[terminal.output.rindex(OPENED) :]
    assert terminal.settings() == terminal.settings_before
    assert "Traceback" not in terminal.output


@pytest.mark.parametrize("key", ["q", "\x03"], ids=["q", "Ctrl-C"])
def test_it_draws_the_server_and_its_clients_until_a_key_ends_it_with_0(server: ServerProcess, key: str) -> None:
    with (
        Collector.connect(server.name, schema=MARKERS, lanes=4, run_dir=server.run_dir, name="walker") as collector,
        Terminal(top(server.name, server.run_dir)) as terminal,
    ):
        collector.write(marker_steps(0, 4, 0, 50))
        collector.flush()
        terminal.wait_for("200 of 1,000 rows, window [0, 200)")
        drawn = terminal.wait_for(f"pid {server.pid}")
        terminal.wait_for("walker", drawn)
        terminal.press("x")  # no key to leave
        terminal.wait_for("walker", terminal.wait_for("q leaves", drawn))
        terminal.press(key)
        assert terminal.wait() == 0
        assert_terminal_given_back(terminal)


def test_sigterm_gives_the_terminal_back(server: ServerProcess) -> None:
    with Terminal(top(server.name, server.run_dir)) as terminal:
        terminal.wait_for("waiting_for_schema")
        terminal.send_signal(signal.SIGTERM)
        assert terminal.wait() == 0
        assert_terminal_given_back(terminal)


@pytest.mark.slow
def test_it_waits_for_a_server_and_goes_on_over_a_restart(start_server: Callable[..., ServerProcess], run_dir: Path) -> None:
    with Terminal(top("phoenix", run_dir)) as terminal:
        drawn = terminal.wait_for("no server named phoenix")
        first = start_server(name="phoenix")
        drawn = terminal.wait_for(f"pid {first.pid}", drawn)
        assert first.stop() == 0
        drawn = terminal.wait_for("no server named phoenix", drawn)
        second = start_server(name="phoenix")
        terminal.wait_for(f"another server: pid {second.pid}", drawn)
        terminal.press("q")
        assert terminal.wait() == 0
        assert_terminal_given_back(terminal)


def test_it_leaves_a_spawned_server_that_has_ended_and_says_so() -> None:
    with ReplayServer.spawn(capacity=1_000, device="cpu") as server, Terminal(top(server.name, Path(server.run_dir))) as terminal:
        terminal.wait_for("waiting_for_schema")
        server.close()
        assert terminal.wait() == 7
        assert "that server has ended" in terminal.output
        assert_terminal_given_back(terminal)


def test_into_a_pipe_it_writes_lines_and_events_and_ends_with_0(server: ServerProcess, children: Children) -> None:
    lines = children.start(top(server.name, server.run_dir), name="top")
    lines.wait_for("waiting_for_schema")
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir, name="walker"):
        lines.wait_for("collector walker (pid ")
        lines.wait_for("0.0 % of 1,000 rows")
    lines.wait_for(" left")
    lines.send_signal(signal.SIGINT)
    assert lines.wait() == 0
    assert "\x1b" not in lines.output
    assert "Traceback" not in lines.output


def test_without_rich_a_terminal_is_refused_by_name_and_a_pipe_is_not(server: ServerProcess, children: Children) -> None:
    words = ["--name", server.name, "--run-dir", str(server.run_dir), "--interval", "0.1"]
    without = f"import sys; sys.modules['rich'] = None; from replay_server.cli import main; sys.exit(main(['top', *{words!r}]))"
    with Terminal([sys.executable, "-c", without]) as terminal:
        assert terminal.wait() == 2
        assert "pip install 'replay-server[top]'" in terminal.text
        assert terminal.settings() == terminal.settings_before
    lines = children.start([sys.executable, "-c", without], name="top")
    lines.wait_for(server.name)
    lines.send_signal(signal.SIGTERM)
    assert lines.wait() == 0


def test_help_tells_the_exit_codes_and_wrong_intervals_are_refused(crash_dir: Path) -> None:
    told = subprocess.run([sys.executable, "-m", "replay_server", "top", "--help"], capture_output=True, text=True, timeout=30, check=True)
    assert "exit codes" in told.stdout
    assert "--interval" in told.stdout
    for interval in ("0", "-1", "nan", "1e9"):
        command = [*top("nobody", crash_dir), "--interval", interval]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert refused.returncode == 2
        assert "--interval" in refused.stderr
