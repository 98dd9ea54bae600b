"""The command: verbs, exit codes, dry runs, the TOML file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from replay_server_client import Collector, Schema, ServerClosing, ServerGone
from replay_server_protocol.segment import segment_dir
from support.processes import Children
from support.raw_client import RawClient, RawCollector
from support.reports import report_of
from support.servers import ServerProcess, spawn_server

import replay_server

SCHEMA = Schema.of(obs=("float32", 3), reward="float32")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "replay_server", *arguments], capture_output=True, text=True, timeout=30, check=False)


def reach(server: ServerProcess) -> tuple[str, ...]:
    return ("--name", server.name, "--run-dir", str(server.run_dir))


@pytest.fixture
def schema_file(tmp_path: Path) -> str:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA.to_wire()))
    return str(file)


def test_help_tells_verbs_options_and_exit_codes() -> None:
    top = run("--help")
    assert top.returncode == 0
    for verb in ("serve", "status", "set", "stop"):
        assert verb in top.stdout
    assert "exit codes" in top.stdout
    serve = run("serve", "--help")
    for option in ("--capacity", "--headroom", "--slot-rows", "--samples-per-insert", "--columns", "--lease", "--dry-run", "--config"):
        assert option in serve.stdout
    assert "default: 1000000" in serve.stdout
    assert "debug" not in serve.stdout.replace("debug, info", "").replace("{debug,", "")


def test_status_in_words_and_as_json(server: ServerProcess) -> None:
    words = run("status", *reach(server))
    assert words.returncode == 0
    assert server.name in words.stdout
    assert "waiting_for_schema" in words.stdout
    found = json.loads(run("status", *reach(server), "--json").stdout)
    schema = json.loads((Path(replay_server.__file__ or "").parent / "status_report.schema.json").read_text())
    jsonschema.validate(found, schema)
    with RawCollector(server.endpoints, SCHEMA, name="walker") as collector:
        collector.publish(1, 0, 16)
        collector.wait_credit(1)
        words = run("status", *reach(server))
        assert "walker" in words.stdout
        assert "16 of 1,000 rows" in words.stdout


def test_status_watch_prints_a_line_a_report_until_interrupted(server: ServerProcess, children: Any) -> None:
    command = [sys.executable, "-m", "replay_server", "status", *reach(server), "--json", "--watch", "--interval", "0.05"]
    watch = children.start(command, name="watch")
    while watch.output.count("report_version") < 3:
        watch.wait_for('"report_version"')
    for line in watch.output.splitlines()[:2]:
        assert json.loads(line)["name"] == server.name
    watch.send_signal(signal.SIGINT)
    assert watch.wait() in (0, 130, -signal.SIGINT)
    assert "Traceback" not in watch.output


def test_set_changes_the_limiter_and_refuses_the_rest_by_name(server: ServerProcess) -> None:
    first = run("set", "samples-per-insert", "4", *reach(server))
    assert (first.returncode, first.stdout) == (0, "samples_per_insert 4 (was none), tolerance 6,144 (was 0)\n")
    assert run("set", "tolerance", "4096", *reach(server)).stdout == "tolerance 4,096 (was 6,144)\n"
    assert run("set", "tolerance", "4096", *reach(server)).stdout == "tolerance 4096\n"
    flow = report_of(server)["flow"]
    assert (flow["samples_per_insert_target"], flow["tolerance_rows"]) == (4, 4096)
    for key, value in (("capacity", "10"), ("tolerance", "-1"), ("tolerance", "many"), ("samples-per-insert", "0")):
        refused = run("set", key, value, *reach(server))
        assert refused.returncode == 2
        assert key in refused.stderr
    assert run("set", "samples-per-insert", "none", *reach(server)).returncode == 0
    assert report_of(server)["flow"]["samples_per_insert_target"] is None


def test_stop_ends_the_server_in_good_order_and_tells_its_clients(server: ServerProcess) -> None:
    with RawClient(server.endpoints, "learner") as learner:
        asked = run("stop", *reach(server), "--timeout", "0.2")
        assert (asked.returncode, asked.stdout) == (0, f"{server.name!r} was told to stop, and has not ended yet\n")
        with pytest.raises(ServerClosing):
            learner.connection.receive(5)
        learner.connection.say_bye()
        assert server.child.wait() == 0
    assert "closing: 1 client has 2 s to detach" in server.child.output
    assert server.child.output.endswith("INFO stopped\n")
    assert list(server.run_dir.iterdir()) == []


def test_stop_says_when_the_server_has_ended(server: ServerProcess) -> None:
    asked = run("stop", *reach(server))
    assert (asked.returncode, asked.stdout) == (0, f"{server.name!r} has stopped\n")
    assert server.child.wait() == 0
    assert "closing: no client is attached" in server.child.output


def test_where_nobody_answers_the_exit_code_is_7_and_the_message_says_how_to_start(crash_dir: Path) -> None:
    for verb in (("status",), ("stop",), ("set", "tolerance", "1")):
        ended = run(*verb, "--name", "nobody", "--run-dir", str(crash_dir), "--timeout", "0.1")
        assert ended.returncode == 7
        assert "replay-server serve --name nobody" in ended.stderr
        assert "Traceback" not in ended.stderr


def test_two_servers_of_one_name_the_second_ends_with_3_and_the_first_serves_on(server: ServerProcess) -> None:
    second = run("serve", *reach(server), "--device", "cpu")
    assert second.returncode == 3
    assert f"pid {server.pid}" in second.stderr
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
        assert collector.flush() == 0


def test_wrong_options_end_with_2_and_name_themselves(crash_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("capacity = 10\nheadrom = 20\n")
    place = ("--run-dir", str(crash_dir), "--device", "cpu")
    for arguments, named in (
        (("--capacity", "none"), "capacity"),
        (("--config", str(file)), "headrom"),
        (("--config", "/nowhere.toml"), "/nowhere.toml"),
        (("--schema", "/nowhere.json"), "/nowhere.json"),
        (("--name", "../up"), "../up"),
        (("--storage", "disk"), "storage"),
        (("--moments", "obs"), None),
    ):
        ended = run("serve", *place, *arguments, *(("--dry-run",) if named is None else ()))
        assert ended.returncode == 2, ended.stderr
        assert (named or "--schema") in ended.stderr
        assert "Traceback" not in ended.stderr
    assert list(crash_dir.iterdir()) == []


def test_a_config_file_is_read_and_the_command_line_wins(
    start_server: Callable[..., ServerProcess], tmp_path: Path, schema_file: str
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(f'capacity = 500\nslot-rows = 20\ncolumns = ["link"]\nschema = "{schema_file}"\n')
    server = start_server("--config", str(file), "--capacity", "600")
    report = report_of(server)
    assert (report["ring"]["capacity_rows"], report["ingress"]["slot_rows"], report["ring"]["columns"]) == (600, 20, ["link"])
    assert report["phase"] == "serving", "with --schema the ring is there from the start"


def test_a_dry_run_prints_the_plan_and_allocates_nothing(crash_dir: Path, schema_file: str) -> None:
    before = set(segment_dir().iterdir())
    plan = run("serve", "--device", "cpu", "--run-dir", str(crash_dir), "--schema", schema_file, "--capacity", "1000000", "--dry-run")
    assert plan.returncode == 0
    assert "1,000,000 rows of capacity + 125,000 of headroom" in plan.stdout
    too_large = run("serve", "--device", "cpu", "--run-dir", str(crash_dir), "--schema", schema_file, "--capacity", "900TiB", "--dry-run")
    assert too_large.returncode == 4
    assert "would fit" in too_large.stderr
    assert list(crash_dir.iterdir()) == []
    assert {path for path in segment_dir().iterdir() if path.name.startswith("replay-")} <= before


def test_a_server_without_memory_for_its_schema_ends_with_4_and_leaves_nothing(crash_dir: Path, schema_file: str) -> None:
    ended = run("serve", "--device", "cpu", "--run-dir", str(crash_dir), "--schema", schema_file, "--capacity", "900TiB")
    assert ended.returncode == 4
    assert "Traceback" not in ended.stderr
    assert list(crash_dir.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_stop_in_good_order(server: ServerProcess, number: signal.Signals) -> None:
    server.child.send_signal(number)
    assert server.child.wait() == 0
    with pytest.raises(ServerGone):
        report_of(server, 0.1)


def test_signals_meant_for_others_change_nothing(children: Children, run_dir: Path) -> None:
    """Batch systems send SIGUSR1 to all processes of a job; nohup lets a server outlive its terminal."""
    server = spawn_server(children, run_dir, within=("nohup",))
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        server.child.send_signal(number)
    assert report_of(server)["pid"] == server.pid
    assert server.stop() == 0


def test_a_server_without_standard_streams_serves_as_ever(children: Children, run_dir: Path) -> None:
    server = spawn_server(children, run_dir, within=("sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-'))
    opened = {os.readlink(f"/proc/{server.pid}/fd/{number}") for number in range(3)}
    assert opened == {os.devnull}, "a socket of that number would be written to by whoever prints"
    assert report_of(server)["pid"] == server.pid
    assert server.stop() == 0


def test_an_unknown_verb_ends_with_2() -> None:
    assert run("serv").returncode == 2
    assert run().returncode == 2


def test_the_cluster_needs_the_extra_and_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray.py").write_text('raise ModuleNotFoundError("No module named ray", name="ray")')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    refused = run("status", "--cluster")
    assert refused.returncode == 2
    assert "pip install 'replay-server[ray]'" in refused.stderr
