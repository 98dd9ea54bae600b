"""A collector on another node, with no Ray between: relay, carrier and host service in one process, a real sidecar behind them."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_server_client import AttachRefused, Collector, Learner, SchemaMismatch
from replay_server_client.observer import Observer
from replay_server_client.ray.carrier import ChunkCarrier
from replay_server_client.ray.delivery import Delivery
from replay_server_client.ray.host_service import HostService
from replay_server_client.ray.parcel import Answer, Asked, Bytes, Header, Sender, stripped
from replay_server_client.request import Request
from replay_server_client.status import query
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import InvalidRequest, ServerClosing, ServerGone
from replay_server_protocol.messages import Publish
from replay_server_protocol.schema import Schema
from support.processes import Children
from support.reports import wait_report
from support.servers import ServerProcess, spawn_server

from replay_server.config import ServerConfig
from replay_server.relay import RelayServer
from replay_server.snapshot.writer import take_snapshot

SCHEMA = Schema.of({"marker": ("int64", ()), "reward": ("float32", ())})


class FailingCalls:
    """Calls of a host that loses its memory, or its answer, at random."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self._server = server
        self._rng = random.Random(seed)
        self._pool = ThreadPoolExecutor(1)
        self._host = self._start()
        self.deaths = 0

    def _start(self) -> HostService:
        return HostService(self._server.name, str(self._server.run_dir))

    def agree(self, schema: dict[str, object]) -> dict[str, object]:
        return self._host.agree(schema)

    def deliver(self, headers: Sequence[Header], rows: Bytes, schema: dict[str, object]) -> Future[Answer]:
        return self._pool.submit(self._deliver, headers, rows, schema)

    def _deliver(self, headers: Sequence[Header], rows: Bytes, schema: dict[str, object]) -> Answer:
        fate = self._rng.random()
        if fate < 0.1:
            self._die("before the call")
        answer = self._host.deliver(headers, rows, schema)
        if fate > 0.9:
            self._die("after the call")
        return answer

    def _die(self, when: str) -> None:
        self.deaths += 1
        self._host.close()
        self._host = self._start()
        raise ConnectionError(when)

    def forget(self, origins: Sequence[str]) -> None:
        self._pool.submit(lambda: self._host.forget(origins))

    def close(self) -> None:
        self._pool.shutdown()
        self._host.close()


class Node:
    """A node without a GPU: collectors connect to ``name`` here."""

    def __init__(self, run_dir: Path, calls: Any, delivery: Delivery[Any] | None = None, *, ahead_bytes: int = 0, **options: Any) -> None:
        self.run_dir = run_dir
        self._is_closed = False
        self.carrier = ChunkCarrier(calls, delivery or Delivery(chunk_bytes=400, linger_s=0.002))
        self.carrier.start()
        config = ServerConfig(name="node", run_dir=str(run_dir), device="cpu", **options)
        self.server = RelayServer(config, self.carrier, ahead_bytes=ahead_bytes)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.server.ask_to_stop()
        self._thread.join(10)
        self.server.close()
        self.carrier.close()


@pytest.fixture
def sidecar(children: Children, crash_dir: Path) -> Iterator[ServerProcess]:
    sidecar = spawn_server(children, crash_dir, "--capacity", "5000", "--slot-rows", "16", "--columns", "link", "--depth", "4")
    yield sidecar
    sidecar.stop()


@pytest.fixture
def calls(sidecar: ServerProcess) -> Iterator[FailingCalls]:
    calls = FailingCalls(sidecar, 1)
    yield calls
    calls.close()


@pytest.fixture
def node(calls: FailingCalls, crash_dir: Path) -> Iterator[Node]:
    node = Node(crash_dir, calls, depth=8)
    yield node
    node.close()


def rows(first: int, n: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"marker": np.arange(first, first + n), "reward": np.ones(n, np.float32)}


def markers(sidecar: ServerProcess) -> list[int]:
    with Observer.connect(sidecar.name, run_dir=sidecar.run_dir) as observer:
        found: list[int] = observer.read(newest=10_000)["marker"].tolist()
        return found


def test_rows_of_two_collectors_are_in_the_ring_once_and_in_order_though_hosts_die(
    node: Node, calls: FailingCalls, sidecar: ServerProcess
) -> None:
    with (
        Collector.connect("node", run_dir=node.run_dir, schema=SCHEMA, lanes=2) as one,
        Collector.connect("node", run_dir=node.run_dir, schema=SCHEMA, lanes=1) as two,
    ):
        for step in range(20):
            one.write(rows(16 * step, 16))
            two.write(rows(100_000 + 16 * step, 16))
        assert one.flush(30) > 0
        assert two.flush(30) > 0
    found = markers(sidecar)
    assert [m for m in found if m < 100_000] == list(range(320))
    assert [m for m in found if m >= 100_000] == list(range(100_000, 100_320))
    assert calls.deaths >= 2
    report: Any = query(Endpoints.resolve(sidecar.name, sidecar.run_dir))
    counters = report["counters"]
    assert counters["rows_published"] == counters["rows_committed"] == 640
    assert report["moments"]["reward"]["count"] == 640


def test_a_credit_means_that_the_rows_are_in_the_ring(node: Node, sidecar: ServerProcess) -> None:
    with Collector.connect("node", run_dir=node.run_dir, schema=SCHEMA) as collector:
        collector.write(rows(0, 40))
        assert collector.flush(30) >= 40
        assert markers(sidecar) == list(range(40))


@pytest.mark.slow
def test_a_full_ring_holds_the_collector_back(children: Children, crash_dir: Path) -> None:
    options = ("--capacity", "64", "--slot-rows", "16", "--samples-per-insert", "1", "--tolerance", "64")
    sidecar = spawn_server(children, crash_dir, *options)
    calls = FailingCalls(sidecar, 2)
    node = Node(crash_dir, calls, depth=2)
    try:
        with Collector.connect("node", run_dir=node.run_dir, schema=SCHEMA) as collector:
            with pytest.raises(TimeoutError, match="the host of the ring"):
                collector.write(rows(0, 400), timeout=0.8)
            assert collector.statistics().rows_written < 200
            collector._ingress.let_go()
    finally:
        node.close()
        calls.close()
        sidecar.stop()


def test_a_mailbox_is_refused_by_name(node: Node) -> None:
    with Collector.connect("node", run_dir=node.run_dir, schema=SCHEMA) as collector:
        collector.write(rows(0, 4))
        with pytest.raises(InvalidRequest, match="mailbox 'policy': a forwarder passes rows on"):
            collector.latest("policy")
        collector.write(rows(4, 4))
        assert collector.flush(30) > 0


class HeldCalls:
    """A host that takes chunks and answers none until it is let go on; ``sizes`` are theirs."""

    def __init__(self, options: dict[str, object]) -> None:
        self.sizes: list[int] = []
        self.has_one = threading.Event()
        self.has_four = threading.Event()
        self.is_held = True
        self._options = options
        self._held: list[tuple[Future[Answer], Answer]] = []

    def agree(self, schema: dict[str, object]) -> dict[str, object]:
        return self._options

    def deliver(self, headers: Sequence[Header], rows: Bytes, schema: dict[str, object]) -> Future[Answer]:
        self.sizes.append(len(rows))
        answered: Future[Answer] = Future()
        answer = Answer({header.origin: header.number for header in headers}, 1, 0)
        if self.is_held:
            self._held.append((answered, answer))
            self.has_one.set()
            if len(self._held) == 4:
                self.has_four.set()
        else:
            answered.set_result(answer)
        return answered

    def forget(self, origins: Sequence[str]) -> None:
        return

    def let_go(self) -> None:
        self.is_held = False
        for answered, answer in self._held:
            answered.set_result(answer)


def test_one_collectors_rows_fill_four_chunks_of_a_mebibyte_on_their_way(crash_dir: Path) -> None:
    schema = Schema.of({"frame": ("uint8", (1024,))})
    calls = HeldCalls({"slot_rows": 512})
    node = Node(crash_dir, calls, Delivery(linger_s=60), ahead_bytes=4 << 20, depth=2)
    try:
        with Collector.connect("node", run_dir=crash_dir, schema=schema) as collector:
            collector.write({"frame": np.zeros((512, 1024), np.uint8)}, timeout=20)
            assert calls.has_one.wait(20)
            collector.write({"frame": np.zeros((7 * 512, 1024), np.uint8)}, timeout=20)
            assert collector.statistics().depth == 8
            assert calls.has_four.wait(20)
            assert calls.sizes == [1 << 19, 1 << 20, 1 << 20, 1 << 20], "the first goes at once, since nothing is on its way"
            calls.let_go()
            collector.flush(20)
        assert sum(calls.sizes) == 4 << 20
    finally:
        node.close()


def test_a_collector_that_asks_for_slots_read_in_place_is_refused_by_a_forwarder(node: Node) -> None:
    with pytest.raises(AttachRefused, match="copies these slots to another node; collect on the node of the ring"):
        Collector.connect("node", run_dir=node.run_dir, schema=SCHEMA, require_zero_copy=True)


def test_learners_and_observers_are_sent_where_the_ring_is(node: Node) -> None:
    with pytest.raises(AttachRefused, match="has no ring"):
        Learner.connect("node", run_dir=node.run_dir, device="cpu")
    with pytest.raises(AttachRefused, match="has no ring"):
        Observer.connect("node", run_dir=node.run_dir)


def test_another_schema_is_refused_by_the_ring(node: Node) -> None:
    Collector.connect("node", run_dir=node.run_dir, schema=SCHEMA).close()
    with pytest.raises(SchemaMismatch, match="marker"):
        Collector.connect("node", run_dir=node.run_dir, schema=Schema.of({"marker": ("int32", ())}))


def test_draws_of_a_host_are_the_windows_rows_and_the_same_for_the_same_key(sidecar: ServerProcess) -> None:
    host = HostService(sidecar.name, str(sidecar.run_dir))
    asked = Asked("me", asdict(Request.transitions(64)), 0, 32, (1, 2, 3))
    with Collector.connect(sidecar.name, run_dir=sidecar.run_dir, schema=SCHEMA) as collector:
        collector.write(rows(1000, 64))
        collector.flush()
        first, again = host.draw(asked, 5.0), host.draw(asked, 5.0)
    assert first.size_rows == 64
    marker = SCHEMA["marker"].view(first.rows)
    assert (marker == first.results["seqs"] + 1000).all()
    assert (first.results["seqs"] == again.results["seqs"]).all()
    assert len(first.rows) == 32
    report: Any = query(Endpoints.resolve(sidecar.name, sidecar.run_dir))
    assert report["counters"]["batches_granted"] == 2
    assert report["flow"]["sampled_rows"] == 64
    host.close()
    sidecar.stop()
    with pytest.raises(ServerGone):
        host.draw(asked, 0.1)
    host.close()


@pytest.mark.slow
def test_what_was_not_credited_goes_to_the_sidecars_successor(children: Children, crash_dir: Path) -> None:
    options = ("--capacity", "5000", "--slot-rows", "16", "--samples-per-insert", "1", "--tolerance", "64")
    first = spawn_server(children, crash_dir, *options, name="ring")
    calls = FailingCalls(first, 3)
    node = Node(crash_dir, calls, depth=4)
    try:
        with Collector.connect("node", run_dir=node.run_dir, schema=SCHEMA) as collector:
            with pytest.raises(TimeoutError):
                collector.write(rows(0, 400), timeout=0.5)  # the first 64 rows fit the band
            written = collector.statistics().rows_written
            first.kill()
            first.child.wait()
            second = spawn_server(children, crash_dir, "--capacity", "5000", "--slot-rows", "16", name="ring")
            collector.write(rows(written, 160), timeout=20)
            collector.flush(20)
            assert collector.statistics().rows_lost == 0
        found = markers(second)
        assert found == list(range(found[0], written + 160))
        assert 0 < found[0] <= 64
    finally:
        node.close()
        calls.close()
        second.stop()


def test_a_host_that_outlived_its_sidecar_takes_rows_of_the_next_ones_schema(children: Children, crash_dir: Path) -> None:
    host = HostService("ring", str(crash_dir))
    for schema in (SCHEMA, Schema.of({"marker": ("int32", ())})):
        sidecar = spawn_server(children, crash_dir, "--capacity", "5000", "--slot-rows", "16", name="ring")
        marker = np.zeros((4, schema.stride), np.uint8)
        schema["marker"].view(marker)[:] = np.arange(4)
        fields = stripped(Publish(1, 1, 1, 0, 4, 0, 0, 0, b"", []))
        header = Header(f"session of {schema.stride}", 1, 1, Sender("collector", 1, True), fields, marker.size)
        host.agree(schema.to_wire())  # makes the ring
        with contextlib.suppress(ServerGone):  # the one before
            host.deliver([header], marker.reshape(-1), schema.to_wire())
        assert host.deliver([header], marker.reshape(-1), schema.to_wire()).through == {header.origin: 1}
        assert markers(sidecar) == list(range(4))
        if schema is SCHEMA:
            sidecar.kill()
            sidecar.child.wait()
    host.close()
    sidecar.stop()


@pytest.mark.slow
def test_a_new_forwarder_of_the_name_goes_on_where_the_one_that_stopped_in_good_order_ended(
    node: Node, calls: FailingCalls, sidecar: ServerProcess, crash_dir: Path
) -> None:
    collector = Collector.connect("node", run_dir=crash_dir, schema=SCHEMA, timeout=20)
    collector.write(rows(0, 160))
    collector.flush(20)
    collector.write(rows(160, 40))
    node.close()
    again = Node(crash_dir, calls, depth=8)
    try:
        with collector:
            with pytest.raises(ServerClosing) as closing:
                collector.write(rows(200, 160), timeout=20)
            collector.write(rows(200 + closing.value.rows_written, 160 - closing.value.rows_written), timeout=20)
            collector.flush(20)
            assert collector.statistics().rows_lost == 0
        assert markers(sidecar) == list(range(360))
    finally:
        again.close()


@pytest.mark.slow
def test_a_collector_that_attaches_to_its_forwarder_again_passes_on_nothing_twice(node: Node, sidecar: ServerProcess) -> None:
    with Collector.connect("node", run_dir=node.run_dir, schema=SCHEMA, timeout=20) as collector:
        for step in range(30):
            collector.write(rows(16 * step, 16))
            if step % 5 == 2:
                collector._ingress.connection.detach()  # the session there lives on, with what it had been told
        collector.flush(30)
        statistics = collector.statistics()
        assert (statistics.rows_committed, statistics.rows_lost) == (480, 0)
        assert statistics.publishes_resumed > 0
    assert markers(sidecar) == list(range(480))
    assert node.server.replay.counters.rows_published == node.server.replay.counters.rows_committed == 480


class DeafCalls(FailingCalls):
    """As long as it ``is_deaf`` no call is heard to be answered, though the rows are committed."""

    is_deaf = False

    def _deliver(self, headers: Sequence[Header], rows: Bytes, schema: dict[str, object]) -> Answer:
        answer = self._host.deliver(headers, rows, schema)
        if self.is_deaf:
            raise ConnectionError("after the call")
        return answer


def test_rows_of_a_restored_snapshot_that_are_sent_again_are_in_the_ring_once(children: Children, crash_dir: Path, tmp_path: Path) -> None:
    options = ("--capacity", "5000", "--slot-rows", "16", "--columns", "link", "--moments", "reward")
    sidecar = spawn_server(children, crash_dir, *options, name="ring")
    calls = DeafCalls(sidecar, 1)
    node = Node(crash_dir, calls, depth=8)
    try:
        with Collector.connect("node", run_dir=crash_dir, schema=SCHEMA) as collector:
            collector.write(rows(0, 32))
            collector.flush(20)
            calls.is_deaf = True
            collector.write(rows(32, 32))
            wait_report(sidecar, lambda found: found["counters"]["rows_committed"] == 64)
            with Observer.connect("ring", run_dir=crash_dir) as observer:
                take_snapshot(observer, tmp_path / "kept")
            collector.write(rows(64, 32))
            wait_report(sidecar, lambda found: found["counters"]["rows_committed"] == 96)
            assert collector.statistics().rows_in_flight == 64
            sidecar.kill()
            sidecar.child.wait()
            sidecar = spawn_server(children, crash_dir, "--restore", str(tmp_path / "kept"), name="ring")
            assert markers(sidecar) == list(range(64))
            calls.is_deaf = False
            collector.flush(30)
            assert collector.statistics().rows_lost == 0
        assert markers(sidecar) == list(range(96))
        report: Any = query(Endpoints.resolve("ring", crash_dir))
        assert report["moments"]["reward"]["count"] == report["counters"]["rows_committed"] == 96
    finally:
        node.close()
        calls.close()
        sidecar.stop()
