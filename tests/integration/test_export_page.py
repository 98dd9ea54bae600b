"""The exporter's page in a real browser: it draws, its console stays free of errors, and it asks nobody else."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from replay_server_client import Collector, Learner, Schema
from support.exporters import ExporterProcess, spawn_exporter
from support.processes import Children
from support.servers import ServerProcess

pytest.importorskip("prometheus_client", reason="the extra `export` is not installed")

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
CHARTS = 8
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


def draw(exporter: ExporterProcess, tmp_path: Path, width: int = 1320) -> str:
    """The document as it stands after some seconds of the page's own time; fails on any word in the console."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'chromium'}",
    ]
    command += [f"--window-size={width},1200", "--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", exporter.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said
    return done.stdout


@needs_chromium
def test_the_page_shows_charts_and_clients(server: ServerProcess, children: Children, tmp_path: Path) -> None:
    exporter = spawn_exporter(children, server.name, server.run_dir)
    schema = Schema.of(obs=("float32", 3), reward="float32")
    with (
        Collector.connect(server.name, schema=schema, lanes=16, run_dir=server.run_dir, name="walker") as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", name="thinker", prefetch=0) as learner,
    ):
        collector.write({"obs": np.zeros((32, 3), np.float32), "reward": np.ones(32, np.float32)})
        learner.sample(16, min_committed=collector.flush())
        exporter.wait("metrics", lambda answer: 'learner="thinker"' in answer[1])
        page = draw(exporter, tmp_path)
    assert page.count("<canvas") == CHARTS
    assert int(re.findall(r'data-points="(\d+)"', page)[-1]) >= 1
    assert 60 <= int(re.findall(r'data-span="(\d+)"', page)[-1]) < 120  # a young run fills the charts
    for told in ("walker", "thinker", f"replay-server {server.name}", ">serving<", "rows of 1 k"):
        assert told in page, told
    assert exporter.stop() == 0


@needs_chromium
@pytest.mark.parametrize("width", [400, pytest.param(1320, marks=pytest.mark.slow)])
def test_the_page_shows_that_there_is_no_server(children: Children, run_dir: Path, tmp_path: Path, width: int) -> None:
    exporter = spawn_exporter(children, "nobody", run_dir)
    exporter.wait("healthz", lambda answer: "nobody" in answer[1])
    page = draw(exporter, tmp_path, width)
    assert page.count("<canvas") == CHARTS
    assert ">absent<" in page
    assert "no server called 'nobody' answered" in page
    assert exporter.stop() == 0


@pytest.mark.slow
@needs_chromium
def test_a_server_that_is_gone_leaves_its_points(start_server: Callable[..., ServerProcess], children: Children, tmp_path: Path) -> None:
    server = start_server("--capacity", "100")
    exporter = spawn_exporter(children, server.name, server.run_dir)
    exporter.wait("healthz", lambda answer: answer[0] == 200)
    server.stop()
    exporter.wait("healthz", lambda answer: "no server" in answer[1])
    page = draw(exporter, tmp_path)
    assert ">absent<" in page
    assert int(re.findall(r'data-points="(\d+)"', page)[-1]) >= 2
    assert exporter.stop() == 0


def test_the_page_loads_nothing_from_elsewhere() -> None:
    folder = Path(__file__).parents[2] / "replay_server" / "export" / "page"
    for name in ("index.html", "page.js", "page.css"):
        assert not re.search(r"https?://|//[a-z]", (folder / name).read_text("utf-8")), name
    assert "innerHTML" not in (folder / "page.js").read_text("utf-8")
    assert "MIT License" in (folder / "uPlot.LICENSE").read_text("utf-8")
