"""Whatever comes to its sockets, the server counts it, refuses it by name, and serves on unchanged."""

from __future__ import annotations

import platform
import random
from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
import zmq
from replay_server_client import Collector, InvalidRequest, ReplayError, Schema, SchemaMismatch, ServerGone
from replay_server_protocol.codec import client_codec
from replay_server_protocol.errors import AttachRefused
from replay_server_protocol.messages import (
    Admin,
    Grant,
    MailPost,
    Mapped,
    Proof,
    Publish,
    Refused,
    Release,
    RingAt,
    Sample,
)
from support.raw_client import RawClient, RawCollector, RawLearner
from support.reports import report_of, wait_report
from support.servers import ServerProcess

SCHEMA = Schema.of(mark="int64")


def send(address: str, *frames: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 2000)
        socket.connect(address)
        socket.send_multipart(frames)


def bad(report: dict[str, Any]) -> int:
    found: int = report["counters"]["bad_messages"]
    return found


def test_garbage_is_counted_and_nothing_else_happens(server: ServerProcess) -> None:
    rng = random.Random(1)
    garbage = [
        (b"",),
        (b"status",),
        (b"\xc1",),
        (b"\x94" * 1000,),
        (rng.randbytes(100_000),),
        (b"one", b"two"),
        (msgpack.packb([]),),
        (msgpack.packb([99, 1, 1]),),
        (msgpack.packb([-1]),),
        (msgpack.packb([2, 1, 1]),),
        (msgpack.packb([1, "one", 1]),),
        (msgpack.packb([1, True, 1]),),
        (msgpack.packb([1, 2**63, 1]),),
        (msgpack.packb({"code": 1}),),
    ]
    with RawCollector(server.endpoints, SCHEMA) as collector:
        for frames in garbage:
            send(server.endpoints.control, *frames)
        wait_report(server, lambda found: bad(found) == len(garbage))
        collector.publish(1, 0, 16)
        assert collector.wait_credit(1).committed == 16


def test_cut_and_flipped_messages_are_never_taken_for_others(server: ServerProcess) -> None:
    rng = random.Random(2)
    with RawCollector(server.endpoints, SCHEMA) as collector:
        whole = client_codec.encode(Publish(collector.connection.session, collector.connection.generation, 1, 0, 16, 0, 0, 0, b"", []))
        for _ in range(60):
            spoilt = bytearray(whole[: rng.randint(1, len(whole))])
            spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
            send(server.endpoints.control, bytes(spoilt))
        wait_report(server, lambda found: bad(found) + found["counters"]["stale_messages"] == 60)
        assert report_of(server)["counters"]["rows_published"] == 0


def test_a_frame_above_the_limit_ends_its_connection_only(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, SCHEMA) as collector:
        send(server.endpoints.control, bytes(5 << 20))
        collector.publish(1, 0, 16)
        assert collector.wait_credit(1).committed == 16


def test_garbage_on_the_status_socket_gets_no_answer_and_harms_nobody(server: ServerProcess) -> None:
    for frames in ((b"",), (b"status", b"status"), (b"STATUS",), (bytes(100_000),)):
        send(server.endpoints.status, *frames)
    assert report_of(server)["name"] == server.name


def test_a_session_is_its_own_connections_only(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, SCHEMA) as collector, RawClient(server.endpoints, "learner") as thief:
        stolen = Publish(collector.connection.session, collector.connection.generation, 1, 0, 16, 0, 0, 0, b"", [])
        thief.connection.send(stolen)
        with pytest.raises(ServerGone, match="does not know this session"):
            thief.receive(Grant)
        assert report_of(server)["counters"]["stale_messages"] == 1
        collector.publish(1, 0, 16)
        assert collector.wait_credit(1).committed == 16


def refusal(client: RawClient) -> Refused:
    return client.receive(Refused)


def test_messages_of_another_role_or_moment_are_refused_by_name(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "16")
    with RawClient(server.endpoints, "learner") as early:
        early.send(Sample, 0, 1, 4, 0, None)
        assert (found := refusal(early)).about == "Sample"
        assert "proves its mapping" in found.message
    with RawCollector(server.endpoints, SCHEMA) as collector, RawLearner(server.endpoints) as learner:
        learner.send(Publish, 1, 0, 16, 0, 0, 0, b"", [])
        assert "learner doesn't send Publish" in refusal(learner).message
        learner.send(Mapped)
        assert "learner doesn't send Mapped" in refusal(learner).message
        for kind, values in ((Sample, (0, 1, 4, 0, None)), (Proof, (1, b"x")), (Admin, (1, "stop", "", "")), (MailPost, (1, "a", 1, {}))):
            collector.send(kind, *values)
            assert f"collector doesn't send {kind.__name__}" in refusal(collector).message
        assert bad(report_of(server)) == 7
        collector.publish(1, 0, 16)
        assert collector.wait_credit(1).committed == 16


def test_publishes_that_can_not_be_are_refused_and_rows_that_are_no_good_rejected(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, SCHEMA) as collector:
        collector.publish(1, 2, 16)
        assert "slot 2 is not one of 2" in refusal(collector).message
        collector.publish(1, 2**62, 16)
        assert "is not one of 2" in refusal(collector).message
        collector.publish(1, 0, 17)
        assert "17 rows don't fit a slot of 16" in refusal(collector).message
        assert collector.wait_credit(1).committed == 0
        collector.publish(2, 0, 2**62)
        assert "don't fit a slot" in refusal(collector).message
        assert collector.wait_credit(2).committed == 0
        collector.publish(3, 0, 16, moments=(b"many",))
        assert "moments" in refusal(collector).message
        collector.wait_credit(3)
        collector.publish(4, 0, 16)
        assert collector.wait_credit(4).committed == 16
        counters = report_of(server)["counters"]
        assert (counters["rows_committed"], counters["rows_rejected"], counters["rows_published"]) == (16, 48, 64)


def test_leases_of_others_are_not_released(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, SCHEMA) as collector, RawLearner(server.endpoints) as one, RawLearner(server.endpoints) as two:
        collector.publish(1, 0, 16)
        grant = one.grant(1)
        for lease in (grant.lease, grant.lease + 1, 2**60):
            two.send(Release, lease, True)
        found = wait_report(server, lambda found: found["counters"]["stale_messages"] == 3)
        assert [learner["open_leases"] for learner in found["learners"]] == [1, 0]
        two.send(Sample, 0, 1, 1001, 0, None)
        assert "1,001" in refusal(two).message
        for number in range(2, 100):
            two.send(Sample, 0, number, 1, 10**9, None)
        assert "wait already" in refusal(two).message
        one.ask(2)
        one.receive(Grant)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"version": 999}, AttachRefused, "protocol 999"),
        ({"start_ticks": 1}, AttachRefused, "is not the one that said HELLO"),
        ({"run_id": "other"}, AttachRefused, "run 'other'"),
        ({"lanes": 0}, InvalidRequest, "lanes"),
        ({"lanes": 17}, InvalidRequest, "--slot-rows 17"),
        ({"schema": None}, InvalidRequest, "schema"),
        ({"schema": {"fields": "all"}}, SchemaMismatch, "fields"),
        ({"schema": {"fields": [["mark", "int65", []]]}}, SchemaMismatch, "int65"),
        ({"schema": Schema.of(mark="int32").to_wire()}, SchemaMismatch, "mark is int32"),
    ],
)
def test_a_hello_that_can_not_be_met_is_refused_with_its_reason(
    server: ServerProcess, changes: dict[str, Any], error: type[ReplayError], words: str
) -> None:
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as good:
        with pytest.raises(error, match=words):
            hello = {"schema": SCHEMA.to_wire(), "lanes": 1, **changes}
            client = RawClient(server.endpoints, "collector", **hello)
            with client:
                found = refusal(client)  # refused after WELCOME
                raise {"schema_mismatch": SchemaMismatch, "invalid_request": InvalidRequest}[found.code](found.message)
        good.write({"mark": np.arange(3)})
        assert good.flush() == 3


def test_sessions_of_a_role_are_bounded(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--max-collectors", "2", "--max-learners", "1")
    with RawCollector(server.endpoints, SCHEMA), RawCollector(server.endpoints, SCHEMA):
        with pytest.raises(AttachRefused, match="--max-collectors"):
            RawCollector(server.endpoints, SCHEMA)
        with RawLearner(server.endpoints), pytest.raises(AttachRefused, match="--max-learners"):
            RawLearner(server.endpoints)
    wait_report(server, lambda found: not found["collectors"])
    with RawCollector(server.endpoints, SCHEMA):
        pass


def test_a_learner_whose_mapping_reads_other_bytes_is_refused(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, SCHEMA), RawClient(server.endpoints, "learner") as liar:
        liar.receive(RingAt)
        liar.send(Proof, 1, b"guess")
        found = refusal(liar)
        assert found.code == "attach_refused"
        assert "reads other bytes" in found.message
        assert f"on {platform.system()} {platform.release()}" in found.message
        server.child.wait_for(found.message)
        liar.send(Sample, 0, 1, 1, 0, None)
        with pytest.raises(ServerGone):
            liar.connection.receive(5)
