"""Promises of a batch: exact views of the rows, stable addresses, and no use after its end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from replay_server_client.batch import Batch
from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.request import Request
from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.schema import DTYPES, Schema

N = 5
CPU = torch.device("cpu")
SCHEMA = Schema.of(
    obs=("float32", 3), action=("float32", (2, 2)), reward="float32", done="bool", odd=("uint8", 3), wide="float64", half=("bfloat16", 2)
)


@pytest.fixture
def memory() -> BatchBuffer:
    memory = BatchBuffer(1, SCHEMA, Request.transitions(N), CPU)
    memory.rows.copy_(torch.from_numpy(np.random.default_rng(0).integers(0, 2, memory.rows.shape, dtype=np.uint8)))
    return memory


@pytest.fixture
def batch(memory: BatchBuffer) -> Batch:
    return Batch(memory, 7, (10, 20))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 2)])
def test_every_dtype_is_seen_as_the_rows_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    schema = Schema.of({"before": "uint8", "x": (dtype, shape), "after": "int16"})
    memory = BatchBuffer(0, schema, Request.transitions(N), CPU)
    memory.rows.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 2, memory.rows.shape, dtype=np.uint8)))
    seen = memory.field("x")
    assert seen.dtype == getattr(torch, dtype)
    assert seen.shape == (N, *shape)
    raw = seen.contiguous().view(torch.uint8) if shape else seen.contiguous().view(N, 1).view(torch.uint8)
    assert raw.numpy().tobytes() == np.ascontiguousarray(schema["x"].view(memory.rows.numpy())).tobytes()


def test_fields_are_views_in_the_schemas_order(batch: Batch, memory: BatchBuffer) -> None:
    assert list(batch.fields) == list(SCHEMA.names)
    batch["reward"][2] = 42.0
    assert SCHEMA["reward"].view(memory.rows.numpy())[2] == 42.0


def test_span_is_one_view_of_adjacent_fields(batch: Batch) -> None:
    span = batch.span("obs", "action", "reward")
    assert span.shape == (N, 8)
    assert span.data_ptr() == batch["obs"].data_ptr()
    assert torch.equal(span[:, 3:7], batch["action"].reshape(N, 4))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "at least one"),
        (("obs", "reward"), "does not follow"),
        (("action", "obs"), "does not follow"),
        (("reward", "done"), "one dtype"),
        (("obs", "nothing"), "no field 'nothing'"),
    ],
)
def test_span_of_what_is_not_one_view_is_refused_by_name(batch: Batch, names: tuple[str, ...], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        batch.span(*names)


def test_compact_is_contiguous_fresh_and_at_a_stable_address(batch: Batch, memory: BatchBuffer) -> None:
    first = batch.compact("action")
    assert first.is_contiguous()
    assert torch.equal(first, batch["action"])
    batch["action"].add_(1)
    later = Batch(memory, 9, (10, 20)).compact("action")
    assert later.data_ptr() == first.data_ptr()
    assert torch.equal(later, batch["action"])


def test_views_of_one_buffer_are_made_once(memory: BatchBuffer) -> None:
    first, later = Batch(memory, 1, (0, 1)), Batch(memory, 3, (0, 1))
    assert first["obs"] is later["obs"]
    assert first.span("obs", "action") is later.span("obs", "action")


def test_expired_batch_keeps_its_numbers_and_refuses_its_tensors(batch: Batch) -> None:
    batch.expire()
    assert (batch.number, batch.buffer, batch.window) == (7, 1, (10, 20))
    for use in (
        lambda: batch["obs"],
        lambda: batch.fields,
        lambda: batch.span("obs"),
        lambda: batch.compact("obs"),
        lambda: batch.seqs,
        lambda: batch.indices,
        lambda: batch.weights,
        lambda: len(batch),
    ):
        with pytest.raises(InvalidRequest, match="batch 7 ended with the next sample"):
            use()
