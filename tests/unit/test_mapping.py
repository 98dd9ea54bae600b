"""Promises of the learner's mapping: refused by name where it can't be, never a silent slow path."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from replay_server_client import mapping
from replay_server_client.mapping import check_device, map_ring
from replay_server_protocol.errors import AttachRefused, InvalidRequest, ProtocolViolation, SchemaMismatch
from replay_server_protocol.messages import RingAt
from replay_server_protocol.schema import Schema
from replay_server_protocol.segment import Segment
from support.clock import FakeClock
from support.granting import SCHEMA, GrantingConnection


@pytest.fixture
def server() -> Iterator[GrantingConnection]:
    server = GrantingConnection(FakeClock())
    yield server
    server.close()


@pytest.fixture
def at(server: GrantingConnection) -> RingAt:
    return server.ring_at


def test_host_ring_is_mapped_without_a_copy(server: GrantingConnection, at: RingAt) -> None:
    ring = map_ring(at, "auto", 1, SCHEMA)
    server.segment.bytes[SCHEMA.stride] = 77
    assert ring.mapping.tensors.rows.shape == (64, SCHEMA.stride)
    assert int(ring.mapping.tensors.rows[1, 0]) == 77
    assert ring.device == torch.device("cpu")
    server.segment.bytes[at.proof_offset :] = 9
    assert ring.mapping.read_cell(at.proof_offset, 64) == bytes([9]) * 64
    ring.mapping.close()
    ring.mapping.close()


def test_a_path_through_host_memory_is_refused_where_no_copy_may_lie_between(at: RingAt) -> None:
    with pytest.raises(AttachRefused, match=r"require_zero_copy: the ring is in host memory .*copied to mps; serve with --device cuda"):
        map_ring(at, "mps", 1, None, require_zero_copy=True)
    ring = map_ring(at, "cpu", 1, None, require_zero_copy=True)
    assert ring.transport == "shared_memory"
    ring.mapping.close()
    ring = map_ring(at, "mps", 1, None)
    assert ring.transport == "staged"
    ring.mapping.close()


def test_segment_that_is_gone_is_named(at: RingAt) -> None:
    with pytest.raises(ProtocolViolation, match="replay-nothing"):
        map_ring(at._replace(handle=b"replay-nothing"), "cpu", 1, None)


@pytest.mark.parametrize("change", [{"ring_rows": 65}, {"ring_rows": 0}, {"alloc_bytes": 100}, {"handle": b"\xff"}])
def test_sizes_that_contradict_each_other_are_refused_before_anything_is_mapped(
    at: RingAt, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Segment, "open", lambda *_: pytest.fail("mapped"))
    with pytest.raises(ProtocolViolation):
        map_ring(at._replace(**change), "cpu", 1, None)  # type: ignore[arg-type]


def test_other_schema_than_expected_is_refused_by_field(at: RingAt) -> None:
    with pytest.raises(SchemaMismatch, match="value"):
        map_ring(at, "cpu", 1, Schema.of(value="int32", extra=("float32", 3)))


def test_cpu_learner_of_a_cuda_ring_is_refused_with_the_remedy(at: RingAt) -> None:
    with pytest.raises(AttachRefused, match="--storage host"):
        map_ring(at._replace(storage="cuda", handle=bytes(64), device_uuid="x"), "cpu", 1, None)


def test_gpu_that_is_not_visible_here_is_named(at: RingAt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AttachRefused, match="GPU 1234, this process sees no GPU"):
        map_ring(at._replace(storage="cuda", handle=bytes(64), device_uuid="1234"), "cuda", 1, None)


def test_the_rings_gpu_is_found_by_its_uuid_whatever_its_number_is_here(at: RingAt, monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = ["aaaa", "bbbb"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    there = at._replace(storage="cuda", handle=bytes(64), device_uuid="bbbb")
    assert mapping._place(there, "auto") == mapping._place(there, "cuda:1") == torch.device("cuda", 1)
    with pytest.raises(AttachRefused, match=r"the ring is on cuda:1 \(GPU bbbb\), device='cuda:0'"):
        mapping._place(there, "cuda:0")
    with pytest.raises(AttachRefused, match=r"on GPU cccc, this process sees aaaa, bbbb; .*CUDA_VISIBLE_DEVICES"):
        mapping._place(there._replace(device_uuid="cccc"), "auto")


def test_equal_pids_of_server_and_learner_are_refused_for_cuda(at: RingAt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_place", lambda *_: torch.device("cuda", 0))
    with pytest.raises(AttachRefused, match=f"both have pid {os.getpid()}"):
        map_ring(at._replace(storage="cuda", handle=bytes(64)), "cuda", os.getpid(), None)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0", "", "mps:0"])
def test_unknown_device_is_refused_with_the_choices(device: str) -> None:
    with pytest.raises(InvalidRequest, match="'auto', 'cpu', 'cuda', 'cuda:N', 'mps'"):
        check_device(device)


def test_cuda_without_a_device_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match="device='cpu'"):
        check_device("cuda")
