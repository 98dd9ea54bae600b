"""Promises of gathers in host memory: whatever interrupts a thread, a half gathered batch is never taken for a whole one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.draw import Drawn, Parameters, draw_uniform
from replay_server_client.gather import HostGather
from replay_server_client.request import Request
from replay_server_client.ring_tensors import RingTensors
from replay_server_protocol.schema import Schema

_RING_ROWS = 64


class _Draw:
    """Draws uniformly, but first raises what it was given."""

    def __init__(self, *raises: BaseException) -> None:
        self._raises = list(raises)

    def __call__(self, drawn: Drawn, ring_rows: int) -> None:
        draw_uniform(drawn, ring_rows)
        if self._raises:
            raise self._raises.pop(0)


Make = Callable[..., tuple[HostGather, BatchBuffer]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(*raises: BaseException) -> tuple[HostGather, BatchBuffer]:
        monkeypatch.setattr("replay_server_client.recipe.draw_uniform", _Draw(*raises))
        return _gather()

    return make


def _gather() -> tuple[HostGather, BatchBuffer]:
    schema = Schema.of(value="int64")
    memory = BatchBuffer(0, schema, Request.transitions(8), torch.device("cpu"))
    gather = HostGather(memory)
    ring = torch.zeros(_RING_ROWS, schema.stride, dtype=torch.uint8)
    ring[:, :8].copy_(torch.arange(_RING_ROWS)[:, None].view(torch.uint8).view(_RING_ROWS, 8))
    gather.bind(RingTensors(ring))
    gather.submit(Parameters(1, 0, _RING_ROWS))
    return gather, memory


def _do(gather: HostGather) -> None:
    work = gather.claim()
    assert work is not None
    work()


def _is_whole(memory: BatchBuffer) -> bool:
    return torch.equal(memory.field("value"), memory.drawn.seqs)


def test_work_interrupted_on_its_way_is_not_complete_and_is_done_again_by_its_thread(make: Make) -> None:
    gather, memory = make(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        _do(gather)
    assert not gather.is_complete()
    _do(gather)
    assert gather.is_complete()
    assert _is_whole(memory)


def test_work_claimed_and_never_begun_is_claimed_again_by_its_thread_alone(make: Make) -> None:
    gather, memory = make()
    assert gather.claim() is not None
    others: list[object] = []
    other = threading.Thread(target=lambda: others.append(gather.claim()))
    other.start()
    other.join()
    assert others == [None]
    _do(gather)
    assert gather.is_complete()
    assert _is_whole(memory)


@pytest.mark.timeout(5)
def test_unbind_does_not_wait_for_work_that_its_own_thread_lost(make: Make) -> None:
    gather, _ = make()
    assert gather.claim() is not None
    gather.unbind()
    assert gather.claim() is None


def test_failed_work_is_told_once_and_done_again(make: Make) -> None:
    gather, memory = make(MemoryError("full"))
    _do(gather)
    assert gather.claim() is None
    with pytest.raises(MemoryError, match="full"):
        gather.is_complete()
    assert not gather.is_complete()
    _do(gather)
    assert gather.is_complete()
    assert _is_whole(memory)
