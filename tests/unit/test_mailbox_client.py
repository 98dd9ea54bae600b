"""Mailbox arrays arrive whole, as copies, or are refused by name; asking in vain costs no round trip."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from replay_server_client import Collector, ReplayTimeout, Schema
from replay_server_client.connection import Connection
from replay_server_client.deadline import Deadline
from replay_server_client.ingress import CollectorHello
from replay_server_client.mailbox import MailPoster, Parcel, unpack
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import BudgetExceeded, InvalidRequest, ProtocolViolation
from replay_server_protocol.messages import MailAsk, MailReturn, Refused
from replay_server_protocol.schema import DTYPES
from support.fake_server import FakeServer
from support.leaks import nothing_left
from support.mail import wait_mail

SCHEMA = Schema.of(reward="float32")


def pack(**arrays: object) -> tuple[dict[str, object], np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    parcel = Parcel.of(arrays)
    memory = np.zeros(parcel.n_bytes, np.uint8)
    parcel.write(memory)
    return parcel.manifest, memory


@pytest.fixture
def server(run_dir: Path) -> Iterator[FakeServer]:
    with nothing_left(), FakeServer(run_dir) as fake:
        yield fake


@pytest.fixture
def collector(server: FakeServer) -> Iterator[Collector]:
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as attached:
        yield attached


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
def test_arrays_of_every_dtype_and_layout_come_out_as_they_went_in(dtype: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(DTYPES[dtype])
    given = {"whole": array, "strided": array[:, ::2].T, "single": array[0, 0, 1], "none": array[:0]}
    arrays = unpack(*pack(**given))
    assert {name: (a.dtype, a.shape, a.tolist()) for name, a in arrays.items()} == {
        name: (a.dtype, a.shape, a.tolist()) for name, a in given.items()
    }


def test_bfloat16_tensors_travel_as_their_bits() -> None:
    import torch

    manifest, memory = pack(w=torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    assert manifest == {"arrays": [["w", "bfloat16", [2], 0]]}
    assert unpack(manifest, memory)["w"].tolist() == [0x3F80, 0xC000]


def test_unpacked_arrays_are_copies() -> None:
    manifest, memory = pack(w=np.ones(3))
    arrays = unpack(manifest, memory)
    memory[:] = 0
    assert arrays["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("wrong", [{}, {"w": [1.0]}, {"w": np.array(["a"])}, {"w": np.zeros(1, np.complex64)}, {"n" * 300: np.zeros(1)}])
def test_what_can_not_be_sent_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        Parcel.of(wrong)


@pytest.mark.parametrize(
    "place",
    [["w", "float32", [3], 8], ["w", "float32", [-1], 0], ["w", "float99", [1], 0], ["w", "float32", [1], -4], ["w", "float32", 1, 0], 7],
)
def test_manifest_that_points_outside_is_a_violation(place: object) -> None:
    with pytest.raises(ProtocolViolation):
        unpack({"arrays": [place]}, np.zeros(16, np.uint8))


def test_latest_is_none_until_there_is_a_version_and_asks_once(server: FakeServer, collector: Collector) -> None:
    assert collector.latest("policy") is None
    assert collector.latest("policy") is None
    assert len(server.of(MailAsk)) == 1


def test_latest_returns_a_newer_version_and_gives_its_segment_back(server: FakeServer, collector: Collector) -> None:
    server.mail("policy", *pack(w=np.full(4, 1.0)))
    latest = collector.latest("policy")
    assert latest is not None
    version, arrays = latest
    assert (version, arrays["w"].tolist()) == (1, [1, 1, 1, 1])
    assert collector.latest("policy", newer_than=1) is None
    server.mail("policy", *pack(w=np.full(4, 2.0)))
    version, arrays = wait_mail(collector, newer_than=1)
    assert (version, arrays["w"].tolist()) == (2, [2, 2, 2, 2])
    assert [m.version for m in server.of(MailReturn) if isinstance(m, MailReturn)] == [1, 2]


def test_versions_of_a_restarted_server_are_newer_than_those_before(server: FakeServer, collector: Collector) -> None:
    for value in (1.0, 2.0, 3.0):
        server.mail("policy", *pack(w=np.full(1, value)))
    latest = collector.latest("policy")
    assert latest is not None
    assert latest[0] == 3
    server.restart()
    assert collector.latest("policy", newer_than=3) is None  # attaches again
    server.mail("policy", *pack(w=np.full(1, 9.0)))
    version, arrays = wait_mail(collector, newer_than=3)
    assert (version, arrays["w"].tolist()) == (1, [9])
    assert collector.latest("policy", newer_than=1) is None


def test_late_answer_is_given_back_unread(server: FakeServer, collector: Collector) -> None:
    server.mail("policy", *pack(w=np.ones(1)))
    collector.latest("other")
    collector._ingress.mail.ask("policy", 0)
    collector._ingress.mail.give_up()
    deadline = Deadline(5.0)
    while not server.of(MailReturn):
        assert collector.latest("other") is None
        assert not deadline.has_passed
    assert len(server.of(MailReturn)) == 1


def test_latest_from_a_stopped_server_raises_in_time(server: FakeServer, collector: Collector) -> None:
    server.is_silent = True
    with pytest.raises(ReplayTimeout, match="no answer about mailbox 'policy'"):
        collector.latest("policy", timeout=0.05)
    server.is_silent = False


def test_posted_arrays_become_a_version_that_a_collector_reads(server: FakeServer) -> None:
    hello = CollectorHello("poster", SCHEMA, 1, False, None)
    connection = Connection(Endpoints.resolve(server.name, server.run_dir), hello)
    try:
        connection.attach(Deadline(5.0))
        poster = MailPoster(connection)
        for wanted in (1, 2):
            poster.start("policy", {"w": np.full(3, wanted, np.int64)})
            while poster.version is None:
                message = connection.receive(5.0)
                assert message is not None
                poster.accept(message)
            assert poster.version == wanted
        poster.start("policy", {"w": np.zeros(1)})
        assert poster.accept(Refused(1, 1, "MailPost", 0, 3, "budget_exceeded", "full", {}))
        with pytest.raises(BudgetExceeded, match="full"):
            poster.version  # noqa: B018
    finally:
        connection.close()
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
        latest = collector.latest("policy")
    assert latest is not None
    assert latest[1]["w"].tolist() == [2, 2, 2]
