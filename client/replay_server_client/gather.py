"""Filling a batch buffer from the ring: draw, then one gather of whole rows. On the CPU at once, on CUDA by a stream of its own.

Each batch buffer has one gather for life; ``bind`` gives it the ring of a generation, ``unbind`` takes it away. On CUDA two events
guard the batch buffer: ``done`` (the gather has filled it) and ``returned`` (the work that the caller had queued by its next
``sample()`` no longer reads it).
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from replay_server_protocol.errors import InvalidRequest
from torch import Tensor

from replay_server_client.batch import BatchBuffer
from replay_server_client.draw import PARAMETERS, Draw, Drawn
from replay_server_client.mapping import Ring

Parameters = tuple[int, int, int]
"""key, tail, size: what Drawn.parameters hold."""
Work = Callable[[], None]

_LONGEST_FILL_S = 10.0
_LOOK_AGAIN_S = 100e-6


class Gather(Protocol):
    """No method but ``bind`` and ``unbind`` waits."""

    def bind(self, ring: Tensor) -> None:
        """The rows to gather from, from now on. Called by the caller's thread only: it may capture a graph."""

    def unbind(self) -> None:
        """Waits for the gather in flight and drops whatever reaches into the ring."""

    def submit(self, parameters: Parameters) -> None:
        """Starts a draw and its gather. From a host ring to another device, the host's part is done before it returns."""

    def claim(self) -> Work | None:
        """What a thread of ours must do for the gather, outside the engine's lock; None if nothing is left to claim."""

    def is_complete(self) -> bool:
        """Whether the last gather was seen complete. Raises what its work raised."""

    def lend(self) -> None:
        """Orders the caller's current stream after the gather."""

    def give_back(self) -> None:
        """Notes the work that the caller has queued on its current stream."""

    def is_idle(self) -> bool:
        """Whether the work noted by ``give_back`` is done."""


def make_gather(ring: Ring, memory: BatchBuffer, draw: Draw) -> Gather:
    """To be called by the caller's thread."""
    if ring.is_for_one_thread:
        return OneThreadGather(memory, draw)
    if ring.stream is None:
        return HostGather(memory, draw)
    return StagedGather(memory, draw, ring.stream) if ring.is_staged else CudaGather(memory, draw, ring.stream)


class HostGather:
    """Ring and batch in host memory: whoever claims the work gathers, so that two batches are gathered at a time where two threads wait.

    A thread that claims again has been interrupted (Ctrl-C) before or in what it had claimed: it gets the same work again.
    """

    def __init__(self, memory: BatchBuffer, draw: Draw) -> None:
        self._fill = _HostFill(memory.drawn, memory.rows, draw)
        self._parameters: Parameters | None = None  # of the gather that is not over
        self._claimed_by = 0
        self._is_over = True  # a bool: Ctrl-C inside an Event would leave its lock held for ever
        self._error: Exception | None = None

    def bind(self, ring: Tensor) -> None:
        self._fill.bind(ring)

    def unbind(self) -> None:
        give_up_s = time.monotonic() + _LONGEST_FILL_S
        while self._claimed_by not in (0, threading.get_ident()) and not self._is_over and time.monotonic() < give_up_s:
            time.sleep(_LOOK_AGAIN_S)  # the work may be under way
        self._parameters, self._claimed_by, self._error = None, 0, None
        self._is_over = True
        self._fill.unbind()

    def submit(self, parameters: Parameters) -> None:
        self._parameters, self._claimed_by, self._is_over = parameters, 0, False

    def claim(self) -> Work | None:
        parameters, thread = self._parameters, threading.get_ident()
        if parameters is None or self._is_over or self._error is not None or self._claimed_by not in (0, thread):
            return None
        self._claimed_by = thread
        return partial(self._work, parameters)

    def is_complete(self) -> bool:
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._is_over

    def lend(self) -> None:
        pass

    def give_back(self) -> None:
        pass

    def is_idle(self) -> bool:
        return True

    def _work(self, parameters: Parameters) -> None:
        try:
            self._fill(parameters)
        except Exception as error:  # noqa: BLE001 - told by is_complete, in whichever thread asks
            self._error, self._claimed_by = error, 0  # not over: what was half gathered must not be taken for a batch
        else:
            self._is_over = True


class OneThreadGather(HostGather):
    """Ring in host memory, batch on a device that one thread alone may use (MPS): gathered on the CPU, then copied in one piece.

    The copy waits for the work queued before it, so a batch is complete when ``submit`` returns and its buffer is free when it is asked
    for. Not run on Apple hardware: tested with the CPU in the place of MPS.
    """

    def __init__(self, memory: BatchBuffer, draw: Draw) -> None:
        self._block = memory.block
        self._host = BatchBuffer(memory.number, memory.schema, len(memory.rows), torch.device("cpu"))
        super().__init__(self._host, draw)
        self._thread = threading.get_ident()

    def submit(self, parameters: Parameters) -> None:
        """Raises InvalidRequest in any thread but the one that made this, before anything is done."""
        if threading.get_ident() != self._thread:
            raise InvalidRequest("batches on mps are filled by the thread that sampled first: call progress() and sample() there")
        self._fill(parameters)
        self._block.copy_(self._host.block)


class _HostFill:
    """Draws and gathers on the CPU, in the thread that calls it.

    By numpy, not by torch.index_select: that starts an OpenMP team, which fights the server and the learner's other threads for the cores
    (2,048 rows on two busy cores: a median of 4 to 20 ms, against 0.5 ms).
    """

    def __init__(self, drawn: Drawn, rows: Tensor, draw: Draw) -> None:
        self._ring: Tensor | None = None
        self._drawn = drawn
        self._rows = rows.numpy()
        self._draw = draw

    def bind(self, ring: Tensor) -> None:
        self._ring = ring

    def unbind(self) -> None:
        self._ring = None

    def __call__(self, parameters: Parameters) -> None:
        ring, drawn = self._ring, self._drawn
        if ring is None:
            raise RuntimeError("a gather without a ring")
        drawn.parameters.numpy()[:] = parameters
        self._draw(drawn, len(ring))
        # The draw is in range, so clip clips nothing; the other modes copy ``out``.
        np.take(ring.numpy(), drawn.indices.numpy(), axis=0, out=self._rows, mode="clip")


class _StreamGather:
    """What both gathers onto a GPU share: the stream and the two events."""

    def __init__(self, memory: BatchBuffer, draw: Draw, stream: torch.cuda.Stream) -> None:
        self._memory = memory
        self._draw = draw
        self._stream = stream
        self._device = memory.rows.device
        self._done = torch.cuda.Event()
        self._returned = torch.cuda.Event()
        self._device_index: int = self._device.index or 0
        self._streams: dict[int, torch.cuda.Stream] = {}
        # The allocator may hand out memory that work queued on the caller's stream still uses; the gather's stream would not wait for it.
        torch.cuda.current_stream(self._device).synchronize()

    def unbind(self) -> None:
        self._stream.synchronize()

    def claim(self) -> Work | None:
        return None

    def is_complete(self) -> bool:
        return bool(self._done.query())

    def lend(self) -> None:
        """Nothing to order: the host saw the gather complete, so work queued from now on reads what it wrote."""

    def give_back(self) -> None:
        self._returned.record(self._current_stream())

    def is_idle(self) -> bool:
        return bool(self._returned.query())

    def _current_stream(self) -> torch.cuda.Stream:
        """The caller's current stream. Its object is looked up by the raw handle: making a new one each time costs 5 us."""
        handle = torch._C._cuda_getCurrentRawStream(self._device_index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self._device)
        return stream


class CudaGather(_StreamGather):
    """Ring and batch on one GPU: the parameters are copied from pinned memory, draw and gather replayed as one CUDA graph."""

    def __init__(self, memory: BatchBuffer, draw: Draw, stream: torch.cuda.Stream) -> None:
        super().__init__(memory, draw, stream)
        self._parameters = torch.zeros(PARAMETERS, dtype=torch.int64, pin_memory=True)
        self._host = self._parameters.numpy()
        self._ring: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def bind(self, ring: Tensor) -> None:
        self._ring = ring
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._returned)  # a batch of the last ring may still be read by queued work
            self._host[:] = (0, 0, 1)
            self._draw_and_gather()  # loads the kernels, which a capture must not; row 0 is read without a lease and thrown away
            self._stream.synchronize()
            self._graph = self._capture()

    def unbind(self) -> None:
        super().unbind()
        self._ring = self._graph = None

    def submit(self, parameters: Parameters) -> None:
        self._host[:] = parameters  # the copy that read it before is complete: so is its gather
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._returned)
            if self._graph is not None:
                self._graph.replay()
            else:
                self._draw_and_gather()
            self._done.record(self._stream)

    def _draw_and_gather(self) -> None:
        ring, drawn = self._ring, self._memory.drawn
        if ring is None:
            raise RuntimeError("a gather without a ring")
        drawn.parameters.copy_(self._parameters, non_blocking=True)
        self._draw(drawn, len(ring))
        torch.index_select(ring, 0, drawn.indices, out=self._memory.rows)

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """Captures in thread-local mode: other threads may use CUDA meanwhile. None, with a warning, where capture fails.

        Only in the caller's thread: while a capture runs, torch refuses CUDA random numbers in every other thread.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._draw_and_gather()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            warnings.warn(f"draw and gather run without a CUDA graph, 50 to 100 us slower a batch: {error}", RuntimeWarning, stacklevel=2)
            return None
        return graph


class StagedGather(_StreamGather):
    """Ring in host memory, batch on a GPU: gathered on the CPU into pinned memory, then copied."""

    def __init__(self, memory: BatchBuffer, draw: Draw, stream: torch.cuda.Stream) -> None:
        super().__init__(memory, draw, stream)
        self._host = BatchBuffer(memory.number, memory.schema, len(memory.rows), torch.device("cpu"), pin_memory=True)
        self._fill = _HostFill(self._host.drawn, self._host.rows, draw)

    def bind(self, ring: Tensor) -> None:
        self._fill.bind(ring)

    def unbind(self) -> None:
        super().unbind()
        self._fill.unbind()

    def submit(self, parameters: Parameters) -> None:
        self._fill(parameters)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._returned)
            self._memory.block.copy_(self._host.block, non_blocking=True)
            self._done.record(self._stream)
