"""Devices that one thread alone may use (MPS), with the CPU in their place: the learner's own calls do everything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from replay_server_client import InvalidRequest, mapping
from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.deadline import Deadline
from replay_server_client.draw import Parameters
from replay_server_client.engine import Engine
from replay_server_client.gather import OneThreadGather
from replay_server_client.learner import Learner
from replay_server_client.mapping import check_device, map_ring
from replay_server_client.request import Request, Seeds
from replay_server_client.ring_tensors import RingTensors
from replay_server_protocol.errors import AttachRefused
from replay_server_protocol.messages import RingAt
from replay_server_protocol.schema import Schema
from support.clock import FakeClock
from support.granting import SCHEMA, GrantingConnection

CPU = torch.device("cpu")


Make = Callable[[int], Learner]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``make(prefetch)``: a learner as ``connect`` makes it."""
    monkeypatch.setattr(mapping, "_ONE_THREAD_DEVICES", {"cpu"})
    made: list[Learner] = []

    def make(prefetch: int) -> Learner:
        clock = FakeClock(start_ns=time.monotonic_ns())  # leases are timed by the real clock here
        engine = Engine(GrantingConnection(clock), "cpu", None)
        engine.attach(Deadline(1))
        engine.start()
        made.append(Learner(engine, Seeds(1, "learner"), prefetch))
        return made[-1]

    yield make
    for learner in made:
        learner.close()


@pytest.fixture
def at() -> Iterator[RingAt]:
    server = GrantingConnection(FakeClock())
    yield server.ring_at
    server.close()


def in_another_thread(call: Callable[[], object]) -> list[Exception]:
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - handed to the test
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def test_batches_are_right_without_a_background_thread_and_keep_their_addresses(make: Make) -> None:
    threads = threading.active_count()
    learner = make(1)
    assert threading.active_count() == threads
    seen = []
    for _ in range(6):
        batch = learner.sample(32)
        assert torch.equal(batch["value"], batch.seqs)
        assert torch.equal(batch.indices, batch.seqs % 64)
        seen.append((batch.buffer, batch["value"].data_ptr()))
        learner.progress()
    assert [buffer for buffer, _ in seen] == [0, 1, 0, 1, 0, 1]
    assert len({address for _, address in seen}) == 2


def test_a_batch_is_copied_in_one_piece(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    copy = torch.Tensor.copy_

    def counted(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copies.append(self.numel())
        return copy(self, source, non_blocking)

    learner = make(0)
    learner.sample(32)
    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    learner.sample(32)
    assert copies == [32 * (SCHEMA.stride + 20)]


def test_every_call_of_another_thread_is_refused_and_the_learner_goes_on(make: Make) -> None:
    learner = make(0)
    learner.sample(8)
    for call in (lambda: learner.sample(8), learner.progress, lambda: learner.wait_ready(0.1)):
        (error,) = in_another_thread(call)
        assert isinstance(error, InvalidRequest)
        assert "belongs to the thread" in str(error)
    assert learner.sample(8).number == 2


def test_a_gather_in_another_thread_is_refused_before_anything_is_done() -> None:
    memory = BatchBuffer(0, SCHEMA, Request.transitions(4), CPU)
    memory.block.zero_()
    gather = OneThreadGather(memory)
    gather.bind(RingTensors(torch.ones((8, SCHEMA.stride), dtype=torch.uint8)))
    (error,) = in_another_thread(lambda: gather.submit(Parameters(1, 0, 8)))
    assert isinstance(error, InvalidRequest)
    assert not memory.block.any()
    gather.submit(Parameters(1, 0, 8))
    assert bool((memory.rows == 1).all())
    assert int(memory.drawn.seqs.max()) < 8


def test_mps_that_is_not_there_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match="device='cpu'"):
        check_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert check_device("mps") == "mps"


def test_float64_fields_are_refused_by_name_on_mps(at: RingAt) -> None:
    doubles = Schema.of(value="int64", angle="float64")
    with pytest.raises(AttachRefused, match="angle"):
        map_ring(at._replace(schema=doubles.to_wire()), "mps", 1, None)


def test_mps_reaches_host_rings_only(at: RingAt) -> None:
    with pytest.raises(AttachRefused, match="--storage host"):
        map_ring(at._replace(storage="cuda", handle=bytes(64)), "mps", 1, None)
