"""Messages that get lost: a publish is repeated until it has its credit, and taken once however often it comes."""

from __future__ import annotations

import random

import pytest
from replay_server_client import Collector
from replay_server_client.connection import Connection
from replay_server_protocol.messages import ClientMessage, Credit, Publish, ServerMessage
from support.markers import MARKERS, marker_steps
from support.rarely import rarely
from support.raw_client import RawCollector, RawLearner
from support.reports import assert_conserved, report_of
from support.servers import ServerProcess

REPEAT_S = 0.03


@pytest.mark.parametrize("seed", [0, *rarely(1, 2)])
def test_rows_arrive_once_and_in_order_over_a_wire_that_loses_publishes_and_credits(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    lost = {"publish": 0, "credit": 0}
    send, receive_nowait = Connection.send, Connection.receive_nowait

    def lossy_send(self: Connection, message: ClientMessage) -> None:
        if isinstance(message, Publish) and rng.random() < 0.3:
            lost["publish"] += 1
        else:
            send(self, message)

    def lossy_receive(self: Connection) -> ServerMessage | None:
        while isinstance(message := receive_nowait(self), Credit) and rng.random() < 0.3:
            lost["credit"] += 1
        return message

    for module in ("publishes", "ingress"):
        monkeypatch.setattr(f"replay_server_client.{module}.REPEAT_S", REPEAT_S)
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir, timeout=30) as collector:
        monkeypatch.setattr(Connection, "send", lossy_send)
        monkeypatch.setattr(Connection, "receive_nowait", lossy_receive)
        for step in range(0, 600, 10):
            collector.write(marker_steps(0, 1, step, 10))
            if rng.random() < 0.2:
                assert collector.flush(30) == step + 10
        assert collector.flush(30) == 600
        monkeypatch.undo()
        assert collector.statistics().repeats > 0
    assert min(lost.values()) > 0
    with RawLearner(server.endpoints) as learner:
        assert learner.window(1, "step")[1].tolist() == list(range(600))
    report = report_of(server)
    assert report["counters"]["rows_published"] == 600
    assert_conserved(report)


def test_the_same_number_twice_is_taken_once_and_answered_each_time(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, MARKERS) as collector:
        collector.publish(1, 0, 16)
        assert collector.wait_credit(1).committed == 16
        for _ in range(3):
            collector.publish(1, 0, 16)
            assert (credit := collector.receive(Credit)).number == 1
            assert credit.committed == 16
        assert report_of(server)["counters"]["rows_published"] == 16


def test_a_publish_after_a_lost_one_is_not_taken_until_both_are_repeated(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, MARKERS) as collector, RawLearner(server.endpoints) as learner:
        collector.fill(0, "step", range(16))
        collector.fill(1, "step", range(16, 32))
        collector.publish(2, 1, 16)  # number 1 was lost on the way
        collector.receive_nothing(Credit, within_s=0.3)
        assert report_of(server)["counters"]["rows_published"] == 0
        collector.publish(1, 0, 16)
        collector.publish(2, 1, 16)
        assert collector.wait_credit(2).committed == 32
        assert learner.window(1, "step")[1].tolist() == list(range(32))
