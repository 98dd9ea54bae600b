"""A client reads a message that names memory of a server that is gone, swept by its successor: it goes on with that one.

So it happens to a client that was stopped for a while. Here the restart comes when the client has the message and opens the memory.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from replay_server_client import Collector, Learner
from replay_server_protocol.segment import Segment
from support.markers import MARKERS, marker_steps
from support.processes import Children
from support.servers import ServerProcess, spawn_server


class Lives:
    """A server with a ring, killed and followed by another when the client next opens what ``module`` opens."""

    def __init__(self, children: Children, run_dir: Path, schema: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_restarted = threading.Event()
        self._options = ("--capacity", "100", "--slot-rows", "16", "--schema", str(schema))
        self._children = children
        self._monkeypatch = monkeypatch
        self.server: ServerProcess = spawn_server(children, run_dir, *self._options)

    def restart_before_opening(self, module: str) -> None:
        def restart_and_open(name: str, n_bytes: int) -> Segment:
            self._monkeypatch.undo()
            self.server.kill()
            self.server = spawn_server(self._children, self.server.run_dir, *self._options, name=self.server.name)
            self.has_restarted.set()
            return Segment.open(name, n_bytes)

        self._monkeypatch.setattr(f"replay_server_client.{module}.Segment", SimpleNamespace(open=restart_and_open))

    def collector(self) -> Collector:
        return Collector.connect(self.server.name, schema=MARKERS, run_dir=self.server.run_dir)

    def learner(self) -> Learner:
        return Learner.connect(self.server.name, device="cpu", run_dir=self.server.run_dir)


@pytest.fixture
def lives(children: Children, crash_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lives:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(MARKERS.to_wire()), "utf-8")
    return Lives(children, crash_dir, schema, monkeypatch)


def test_a_collector_attaches_to_the_next_server_when_its_slots_are_gone(lives: Lives) -> None:
    lives.restart_before_opening("slot_memory")
    with lives.collector() as collector:
        assert lives.has_restarted.is_set()
        collector.write(marker_steps(0, 1, 0, 20))
        assert collector.flush() == 20
    assert lives.server.stop() == 0


def test_a_learner_attaches_to_the_next_server_when_the_ring_is_gone(lives: Lives) -> None:
    lives.restart_before_opening("mapping")
    with lives.learner() as learner:
        assert lives.has_restarted.wait(20)
        with lives.collector() as collector:
            collector.write(marker_steps(0, 1, 0, 20))
            assert learner.sample(8, min_committed=collector.flush()).window == (0, 20)
        assert learner.statistics().generations == 2
    assert lives.server.stop() == 0


def test_a_collector_goes_on_when_the_mail_it_was_lent_is_gone(lives: Lives) -> None:
    with lives.learner() as learner, lives.collector() as collector:
        learner.post("policy", {"w": np.arange(3)})
        lives.restart_before_opening("mailbox")
        assert collector.latest("policy") is None, "nothing was posted to the next server"
        assert lives.has_restarted.is_set()
        collector.write(marker_steps(0, 1, 0, 20))
        assert collector.flush() == 20
        assert learner.sample(8).window == (0, 20)
    assert lives.server.stop() == 0


def test_a_post_reaches_the_next_server_when_the_memory_lent_for_it_is_gone(lives: Lives) -> None:
    with lives.learner() as learner:
        lives.restart_before_opening("mailbox")
        assert learner.post("policy", {"w": np.arange(3)}, timeout=20) == 1
        assert lives.has_restarted.is_set()
        with lives.collector() as collector:
            mail = collector.latest("policy")
            assert mail is not None
            assert mail[1]["w"].tolist() == [0, 1, 2]
    assert lives.server.stop() == 0
