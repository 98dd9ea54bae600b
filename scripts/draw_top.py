"""Draws the picture of ``replay-server top`` in docs/images/top.svg: a real server, two collectors and a learner, held in step.

`python scripts/draw_top.py` starts them, lets them run for a few seconds and draws the last view with rich; `--record` also
keeps the last report for the tests.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
from replay_server_client import Collector, Learner, Schema
from rich.console import Console

from replay_server import ReplayServer
from replay_server.top.picture import Picture
from replay_server.top.watch import Watch

CHECKOUT = Path(__file__).parent.parent
PAGE = CHECKOUT / "docs" / "images" / "top.svg"
RECORDED = CHECKOUT / "tests" / "support" / "recorded_report.json"
COLUMNS, REPORTS = 100, 30
SCHEMA = Schema.of(obs=("float32", 24), action=("float32", 4), reward="float32", terminated="bool")
LANES, BATCH = 16, 256


def collect(name: str, is_over: threading.Event) -> None:
    """Steps of made-up environments whose episodes last 100 steps, as fast as the server takes them."""
    rng = np.random.default_rng(0)
    with Collector.connect(schema=SCHEMA, lanes=LANES, name=name) as collector:
        step = 0
        while not is_over.is_set():
            step += 1
            rows = {"obs": np.zeros((LANES, 24), np.float32), "action": np.zeros((LANES, 4), np.float32)}
            reward = rng.normal(0.5, 1.0, LANES).astype(np.float32)
            collector.write({**rows, "reward": reward, "terminated": np.full(LANES, step % 100 == 0)})


def learn(is_over: threading.Event) -> None:
    with Learner.connect(device="cpu", name="sac") as learner:
        learner.wait_ready(timeout=30)
        while not is_over.is_set():
            learner.sample(BATCH)
            learner.post("policy", {"w": np.zeros(1000, np.float32)})


def main() -> int:
    options = {"device": "cpu", "learning_starts": 1_000, "samples_per_insert": 1.0, "tolerance": 20_000}
    collected, learned = threading.Event(), threading.Event()
    with ReplayServer.spawn(capacity=1_000_000, **options) as server:
        collectors = [threading.Thread(target=collect, args=(f"walker-{n}", collected)) for n in range(2)]
        learner = threading.Thread(target=learn, args=(learned,))
        watch = Watch("default")
        watch.take(server.status(), time.monotonic(), time.strftime("%H:%M:%S"))
        for worker in (*collectors, learner):
            worker.start()
        for _ in range(REPORTS):
            time.sleep(0.2)
            report = {**server.status(), "name": "default"}
            view = watch.take(report, time.monotonic(), time.strftime("%H:%M:%S"))
        for over, workers in ((collected, collectors), (learned, [learner])):  # in step: the last rows need the learner
            over.set()
            for worker in workers:
                worker.join()
    console = Console(record=True, width=COLUMNS, force_terminal=True, color_system="truecolor", file=sys.stderr)
    console.print(Picture(view))
    PAGE.write_text(console.export_svg(title="replay-server top"), "utf-8")
    if "--record" in sys.argv[1:]:
        RECORDED.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
