"""Batches on the GPU read by the real CuPy and JAX: the same memory, whole data, and the two rules that keep their streams in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from replay_server_client import Collector, Learner, Schema
from replay_server_client.adapters import dlpack_fields, wait_for_stream
from support.draws import hold_stream
from support.servers import ServerProcess
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # the libraries' own warnings are their business

SCHEMA = Schema.of(mark="int64", obs=("float32", 7), half=("float16", 3), pixels=("uint8", (3, 2)), ended="bool")
CAPACITY, BATCH_ROWS = 2000, 256
WITHIN_S = 20.0
LATE_S = 0.05
"""How long a stream is held: many times what the next batch takes."""
ROUNDS = 5


@pytest.fixture(scope="module")
def cupy() -> Iterator[Any]:
    """CuPy that has used the GPU: what it opens once is open before any leak check looks. None of its kernels is compiled here."""
    library = pytest.importorskip("cupy", reason="needs the real CuPy: pip install cupy-cuda13x", exc_type=ImportError)
    library.from_dlpack(torch.zeros(4, device="cuda")).get()
    yield library
    library.get_default_memory_pool().free_all_blocks()


@pytest.fixture(scope="module")
def jax() -> Iterator[Any]:
    """JAX that has compiled something for the GPU; with 64-bit numbers, and without taking most of the memory at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        library = pytest.importorskip("jax", reason="needs the real JAX: pip install 'jax[cuda13]'", exc_type=ImportError)
        try:
            library.devices("cuda")
        except RuntimeError as error:
            pytest.skip(f"JAX sees no CUDA device: {error}")
        had_x64 = library.config.jax_enable_x64
        library.config.update("jax_enable_x64", True)
        library.block_until_ready(library.jit(lambda x: x + 1)(library.dlpack.from_dlpack(torch.zeros(4, device="cuda"))))
        yield library
        library.config.update("jax_enable_x64", had_x64)


def rows(seqs: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The rows of these numbers, field by field."""
    return {
        "mark": seqs,
        "obs": (seqs[:, None] % 1009 + np.arange(7)).astype(np.float32),
        "half": (seqs[:, None] % 997 + np.arange(3)).astype(np.float16),
        "pixels": ((seqs[:, None, None] + np.arange(6).reshape(3, 2)) % 256).astype(np.uint8),
        "ended": seqs % 3 == 0,
    }


@pytest.fixture
def attach(start_server: Callable[..., ServerProcess]) -> Iterator[Callable[[int], Learner]]:
    """``attach(prefetch)``: a learner of a server whose ring is full."""
    server = start_server("--device", "cuda", "--capacity", str(CAPACITY), "--slot-rows", "256")
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, timeout=WITHIN_S) as collector:
        collector.write(rows(np.arange(CAPACITY)))
        collector.flush(WITHIN_S)
        learners: list[Learner] = []

        def connect(prefetch: int) -> Learner:
            learners.append(Learner.connect(server.name, run_dir=server.run_dir, device="cuda", prefetch=prefetch, timeout=WITHIN_S))
            return learners[-1]

        yield connect
        for learner in learners:
            learner.close()


def drawn(batch: Any) -> np.ndarray[Any, Any]:
    return np.array(batch.seqs.cpu())


def test_cupy_has_every_compact_field_in_the_batch_buffers_own_memory(cupy: Any, attach: Callable[[int], Learner]) -> None:
    learner = attach(0)
    for _ in range(3):
        batch = learner.sample(BATCH_ROWS)
        tensors, told = dlpack_fields(batch), rows(drawn(batch))
        assert set(tensors) == set(SCHEMA.names)
        for name, tensor in tensors.items():
            array = cupy.from_dlpack(tensor)
            assert array.data.ptr == tensor.data_ptr(), name
            assert array.flags.c_contiguous, name
            assert (array.dtype, array.shape) == (told[name].dtype, told[name].shape)
            assert np.array_equal(array.get(), told[name]), name


def test_jax_has_every_compact_field_in_the_batch_buffers_own_memory(jax: Any, attach: Callable[[int], Learner]) -> None:
    learner = attach(0)
    for _ in range(3):
        batch = learner.sample(BATCH_ROWS)
        tensors, told = dlpack_fields(batch), rows(drawn(batch))
        assert set(tensors) == set(SCHEMA.names)
        for name, tensor in tensors.items():
            array = jax.dlpack.from_dlpack(tensor)
            assert array.unsafe_buffer_pointer() == tensor.data_ptr(), name
            assert (array.dtype, array.shape) == (told[name].dtype, told[name].shape)
            assert np.array_equal(np.asarray(array), told[name]), name


def test_rule_1_a_stream_of_cupy_reads_after_the_copy(cupy: Any, attach: Callable[[int], Learner]) -> None:
    """Torch's stream is held, so the copy is late: the memory still has the batch before when CuPy's own stream is asked to read it."""
    learner, stream, read = attach(0), cupy.cuda.Stream(non_blocking=True), cupy.empty(BATCH_ROWS, np.int64)
    for _ in range(ROUNDS):
        batch = learner.sample(BATCH_ROWS, timeout=WITHIN_S)
        seqs = drawn(batch)
        hold_stream(LATE_S)
        with stream:
            array = cupy.from_dlpack(dlpack_fields(batch, "mark")["mark"])
            read.data.copy_from_device_async(array.data, array.nbytes, stream)
        stream.synchronize()
        assert np.array_equal(read.get(), seqs)


def test_rule_1_jax_reads_after_the_copy(jax: Any, attach: Callable[[int], Learner]) -> None:
    learner, double = attach(0), jax.jit(lambda x: 2 * x)
    for _ in range(ROUNDS):
        batch = learner.sample(BATCH_ROWS, timeout=WITHIN_S)
        seqs = drawn(batch)
        hold_stream(LATE_S)
        doubled = double(jax.dlpack.from_dlpack(dlpack_fields(batch, "mark")["mark"]))
        assert np.array_equal(np.asarray(doubled), 2 * seqs)
        jax.block_until_ready(doubled)


def rounds_read_wrong(cupy: Any, learner: Learner, prefetch: int, *, is_told: bool) -> int:
    """Rounds in which CuPy's own stream, held before it reads a batch, read rows of a later one.

    Read are memory that the next gather writes (``seqs``) and memory that ``dlpack_fields`` writes; both are asked for again at once.
    """
    stream = cupy.cuda.Stream(non_blocking=True)
    reads = [cupy.empty(BATCH_ROWS, np.int64) for _ in range(2)]
    wrong = 0
    for _ in range(ROUNDS):
        batch = learner.sample(BATCH_ROWS, timeout=WITHIN_S)
        seqs = drawn(batch)
        shared: list[Tensor] = [batch.seqs, dlpack_fields(batch, "mark")["mark"]]
        with stream:
            arrays = [cupy.from_dlpack(tensor) for tensor in shared]
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                hold_stream(LATE_S)
            for read, array in zip(reads, arrays, strict=True):
                read.data.copy_from_device_async(array.data, array.nbytes, stream)
        if is_told:
            wait_for_stream(stream.ptr)
        for _ in range(prefetch + 1):
            dlpack_fields(learner.sample(BATCH_ROWS, timeout=WITHIN_S), "mark")
        stream.synchronize()
        wrong += not all(np.array_equal(read.get(), seqs) for read in reads)
    return wrong


@pytest.mark.parametrize("prefetch", [0, 1])
def test_rule_2_the_next_gather_comes_after_a_stream_of_cupy_that_was_told(
    cupy: Any, attach: Callable[[int], Learner], prefetch: int
) -> None:
    learner = attach(prefetch)
    assert rounds_read_wrong(cupy, learner, prefetch, is_told=True) == 0
    assert rounds_read_wrong(cupy, learner, prefetch, is_told=False) > 0  # else the reading was never late enough to show anything


@pytest.mark.parametrize("prefetch", [0, 1])
def test_rule_2_what_jax_was_waited_for_has_read_whole_rows(jax: Any, attach: Callable[[int], Learner], prefetch: int) -> None:
    """The loop reads the batch again and again, so rows that change under it change its sum."""
    learner, times = attach(prefetch), 8
    reread = jax.jit(lambda x: jax.lax.fori_loop(0, times * BATCH_ROWS, lambda at, total: total + x[at % BATCH_ROWS], 0 * x[0]))
    for _ in range(ROUNDS):
        batch = learner.sample(BATCH_ROWS, timeout=WITHIN_S)
        seqs = drawn(batch)
        total = reread(jax.dlpack.from_dlpack(dlpack_fields(batch, "mark")["mark"]))
        jax.block_until_ready(total)
        for _ in range(prefetch + 1):
            dlpack_fields(learner.sample(BATCH_ROWS, timeout=WITHIN_S), "mark")
        assert int(total) == times * int(seqs.sum())
