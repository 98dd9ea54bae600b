"""A real exporter beside a real server: metrics, health, report and page, also while the server is away or a new one."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from replay_server_client import Collector, Learner, Schema
from support.exporters import Answer, ExporterProcess, export_command, spawn_exporter
from support.processes import Children
from support.servers import ServerProcess

pytest.importorskip("prometheus_client", reason="the extra `export` is not installed")

from prometheus_client.parser import text_string_to_metric_families

SCHEMA = Schema.of(obs=("float32", 3), reward="float32")
ROWS = {"obs": np.zeros((32, 3), np.float32), "reward": np.ones(32, np.float32)}


def metrics_of(answer: Answer) -> dict[str, float]:
    """Every sample by its name and labels, as ``name{label=value}``."""
    status, text = answer
    assert status == 200
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {s.name.removeprefix("replay_server_") + "".join(f"{{{k}={v}}}" for k, v in s.labels.items()): s.value for s in samples}


@pytest.fixture
def exporter(server: ServerProcess, children: Children) -> Iterator[ExporterProcess]:
    started = spawn_exporter(children, server.name, server.run_dir)
    yield started
    assert started.stop() == 0


def test_what_clients_do_is_in_the_metrics(server: ServerProcess, exporter: ExporterProcess) -> None:
    with (
        Collector.connect(server.name, schema=SCHEMA, lanes=16, run_dir=server.run_dir, name="walker") as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", name="thinker", prefetch=0) as learner,
    ):
        collector.write(ROWS)
        seq = collector.flush()
        for _ in range(3):
            learner.sample(16, min_committed=seq)
        found = metrics_of(exporter.wait("metrics", lambda answer: 'learner_batches_total{learner="thinker"} 3.0' in answer[1]))
        assert found["up"] == found["phase{phase=serving}"] == found["collectors"] == found["learners"] == 1
        assert found["committed_rows_total"] == found["collector_committed_rows_total{collector=walker}"] == 32
        assert found["learner_sampled_rows_total{learner=thinker}"] == 48
        assert found["ring_size_rows"] == 32
        assert found["commit_duration_seconds_count"] == found["slot_wait_duration_seconds_count"] == 2  # slots of 16 rows
        assert found["grant_duration_seconds_count"] == found["batches_granted_total"] >= 3
        assert 0 < found["grant_duration_seconds_sum"] < 10
        assert found["sample_age_seconds_count"] == 48
    ended = metrics_of(exporter.wait("metrics", lambda answer: "replay_server_learners 0.0" in answer[1]))
    assert ended["learner_batches_total{learner=thinker}"] == 3


def test_health_and_report_of_a_living_server(server: ServerProcess, exporter: ExporterProcess) -> None:
    assert exporter.wait("healthz", lambda answer: answer[0] == 200) == (200, "ok\n")
    status, text = exporter.ask("status")
    assert (status, json.loads(text)["name"], json.loads(text)["pid"]) == (200, server.name, server.pid)


def test_a_server_that_goes_and_comes_again_is_shown(start_server: Callable[..., ServerProcess], children: Children) -> None:
    server = start_server("--capacity", "100")
    exporter = spawn_exporter(children, server.name, server.run_dir)
    exporter.wait("healthz", lambda answer: answer[0] == 200)
    assert server.stop() == 0
    _, reason = exporter.wait("healthz", lambda answer: answer[0] == 503 and "no server" in answer[1])
    assert server.name in reason
    status, text = exporter.ask("status")
    assert (status, list(json.loads(text))) == (503, ["error"])
    assert metrics_of(exporter.ask("metrics"))["up"] == 0
    start_server("--capacity", "100", name=server.name)
    exporter.wait("healthz", lambda answer: answer[0] == 200)
    assert metrics_of(exporter.ask("metrics"))["restarts_total"] == 1
    view = json.loads(exporter.ask("view?after=0")[1])
    fills = [point[view["keys"].index("fill")] for point in view["points"]]
    assert None in fills
    assert (fills[0], fills[-1], view["restarts"]) == (0.0, 0.0, 1)
    assert exporter.stop() == 0


@pytest.mark.slow
def test_it_starts_before_its_server(children: Children, run_dir: Path) -> None:
    exporter = spawn_exporter(children, "nobody", run_dir)
    exporter.wait("healthz", lambda answer: answer[0] == 503 and "nobody" in answer[1])
    assert exporter.ask("")[0] == 200
    assert exporter.stop() == 0


def test_other_addresses_are_not_there(exporter: ExporterProcess) -> None:
    for path in ("nope", "../cli.py", "page/index.html", "%2e%2e/web.py", "index.html/"):
        assert exporter.ask(path)[0] == 404, path


def test_a_strange_question_gets_all_points(exporter: ExporterProcess) -> None:
    exporter.wait("healthz", lambda answer: answer[0] == 200)
    for query in ("after=-1", "after=x", "after=" + "9" * 400, "after=", "before=3"):
        view = json.loads(exporter.ask(f"view?{query}")[1])
        assert len(view["points"]) == view["next"] > 0, query


def test_nothing_can_be_written(exporter: ExporterProcess) -> None:
    connection = http.client.HTTPConnection(urlsplit(exporter.url).netloc, timeout=5)
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        connection.request(method, "/status")
        with connection.getresponse() as answer:
            assert answer.status == 501
        connection.close()
    connection.request("HEAD", "/metrics")
    with connection.getresponse() as answer:
        assert (answer.status, answer.read()) == (200, b"")
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'")
    connection.close()


def test_a_foreign_name_for_this_machine_is_refused(exporter: ExporterProcess) -> None:
    assert exporter.ask("status", Host="evil.example")[0] == 421
    assert exporter.ask("healthz", Host="localhost:9108")[0] in (200, 503)


@pytest.mark.slow
def test_silent_connections_keep_nobody_out_for_long(exporter: ExporterProcess) -> None:
    host = urlsplit(exporter.url)
    silent = [socket.create_connection((host.hostname, host.port or 0)) for _ in range(100)]
    try:
        ended = threading.Event()
        for connection in silent:
            connection.settimeout(15)
            connection.recv(1)  # turned away at once, or when its patience is at an end
        ended.set()
    finally:
        for connection in silent:
            connection.close()
    assert ended.is_set()
    assert exporter.ask("")[0] == 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--interval", "0"], "--interval"),
        (["--port", "70000"], "--port"),
        (["--host", "256.0.0.1"], "--host"),
        (["--name", "a/b"], "name"),
    ],
)
def test_a_wrong_option_ends_it_with_2(children: Children, run_dir: Path, options: list[str], said: str) -> None:
    child = children.start(export_command("nobody", run_dir, *options), name="exporter")
    assert child.wait() == 2
    assert said in child.output


def test_a_port_that_is_taken_ends_it_with_2(children: Children, run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child = children.start(export_command("nobody", run_dir, "--port", str(port)), name="exporter")
        assert child.wait() == 2
    assert f"--port {port}" in child.output


def test_without_its_extra_it_says_what_to_install(children: Children, run_dir: Path) -> None:
    lost = "import sys; sys.modules['prometheus_client'] = None; from replay_server.cli import main; sys.exit(main())"
    command = export_command("nobody", run_dir)
    child = children.start([command[0], "-c", lost, *command[3:]], name="exporter")
    assert child.wait() == 2
    assert "replay-server[export]" in child.output
