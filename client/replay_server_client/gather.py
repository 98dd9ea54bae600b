"""Filling a batch buffer from the ring, by its recipe. On the CPU at once, on CUDA by a stream of its own.

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

import torch
from replay_server_protocol.errors import InvalidRequest

from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.compiled import HowToRun, plain
from replay_server_client.draw import PARAMETERS, Parameters
from replay_server_client.mapping import Ring
from replay_server_client.pinned import pinned_words
from replay_server_client.recipe import Recipe, take_by_numpy, take_by_torch
from replay_server_client.ring_tensors import RingTensors
from replay_server_client.side_stream import SideStream, SideStreams
from replay_server_client.write_back import WriteBack

Work = Callable[[], None]

_LONGEST_FILL_S = 10.0
_LOOK_AGAIN_S = 100e-6


class Gather(Protocol):
    """No method but ``bind`` and ``unbind`` waits."""

    def bind(self, ring: RingTensors) -> None:
        """What to gather from, from now on. Called by the caller's thread only: it may capture a graph.

        Raises InvalidRequest for a request that schema or server can't serve.
        """

    def unbind(self) -> None:
        """Waits for the gather in flight and drops whatever reaches into the ring."""

    def submit(self, parameters: Parameters) -> None:
        """Starts a draw and its gather. From a host ring to another device, the host's part is done before it returns."""

    def claim(self) -> Work | None:
        """What a thread of ours must do for the gather, outside the engine's lock; None if nothing is left to claim."""

    @property
    def is_claimed(self) -> bool:
        """Whether a thread is at the work that ``claim`` gave it."""

    def is_complete(self) -> bool:
        """Whether the last gather was seen complete. Raises what its work raised."""

    def lend(self) -> None:
        """Orders the caller's current stream after the gather."""

    def give_back(self) -> None:
        """Notes the work that the caller has queued on its current stream."""

    def is_idle(self) -> bool:
        """Whether the work noted by ``give_back`` is done."""

    @property
    def write_backs(self) -> tuple[WriteBack, ...]:
        """Who counts what became of writes: of the batch buffer, and of the memory in which it is filled if that is another."""


def make_gather(ring: Ring, memory: BatchBuffer, side_streams: SideStreams, how: HowToRun = plain) -> Gather:
    """To be called by the caller's thread. ``how`` the recipe's pure functions are run."""
    if ring.is_for_one_thread:
        return OneThreadGather(memory, how)
    if ring.device.type != "cuda":
        return HostGather(memory, how)
    side = side_streams.on(ring.device, captures=not ring.is_staged)
    return StagedGather(memory, side, how) if ring.is_staged else CudaGather(memory, side, how)


class HostGather:
    """Ring and batch in host memory: whoever claims the work gathers, so that two batches are gathered at a time where two threads wait.

    A thread that claims again has been interrupted (Ctrl-C) before or in what it had claimed: it gets the same work again.
    """

    def __init__(self, memory: BatchBuffer, how: HowToRun = plain) -> None:
        self._fill = _HostFill(memory, how)
        self.write_backs: tuple[WriteBack, ...] = (memory.write_back,)
        self._parameters: Parameters | None = None  # of the gather that is not over
        self._claimed_by = 0
        self._is_over = True  # a bool: Ctrl-C inside an Event would leave its lock held for ever
        self._error: Exception | None = None

    def bind(self, ring: RingTensors) -> None:
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

    @property
    def is_claimed(self) -> bool:
        return self._claimed_by != 0 and not self._is_over

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

    def __init__(self, memory: BatchBuffer, how: HowToRun = plain) -> None:
        self._memory = memory
        self._host = BatchBuffer(memory.number, memory.schema, memory.request, torch.device("cpu"))
        super().__init__(self._host, how)
        self.write_backs = (memory.write_back, self._host.write_back)
        self._thread = threading.get_ident()

    def submit(self, parameters: Parameters) -> None:
        """Raises InvalidRequest in any thread but the one that made this, before anything is done."""
        if threading.get_ident() != self._thread:
            raise InvalidRequest("batches on mps are filled by the thread that sampled first: call progress() and sample() there")
        self._fill(parameters)
        self._memory.block.copy_(self._host.block)

    def give_back(self) -> None:
        self._host.write_back.copy_(self._memory.write_back)


class _HostFill:
    """Follows a recipe on the CPU, in the thread that calls it and in that alone: torch's team of threads would fight the server and the
    learner's other threads for the cores, and lose. Plain draws don't ask torch, and spare the two calls that say so."""

    def __init__(self, memory: BatchBuffer, how: HowToRun) -> None:
        self._is_plain = memory.request.is_plain and not memory.write_back.is_kept
        self._memory = memory
        self._how = how
        self._parameters = memory.drawn.parameters.numpy()
        self._recipe: Recipe | None = None

    def bind(self, ring: RingTensors) -> None:
        self._recipe = Recipe(self._memory, ring, take_by_numpy, self._how)
        if self._how is not plain:
            self._compile(ring)

    def unbind(self) -> None:
        self._recipe = None

    def __call__(self, parameters: Parameters) -> None:
        recipe = self._recipe
        if recipe is None:
            raise RuntimeError("a gather without a ring")
        parameters.write_to(self._parameters)
        if self._is_plain:
            recipe()
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            recipe()
        finally:
            torch.set_num_threads(threads)

    def _compile(self, ring: RingTensors) -> None:
        """In the thread that binds, with memory beside the batch buffer's, which may be lent: row 0 is read and thrown away."""
        memory = BatchBuffer(self._memory.number, self._memory.schema, self._memory.request, torch.device("cpu"))
        Parameters(0, 0, 1).write_to(memory.drawn.parameters.numpy())
        Recipe(memory, ring, take_by_numpy, self._how)()


class _StreamGather:
    """What both gathers onto a GPU share: the stream and the two events."""

    def __init__(self, memory: BatchBuffer, side: SideStream) -> None:
        self._memory = memory
        self.write_backs: tuple[WriteBack, ...] = (memory.write_back,)
        self._side = side
        self._stream = side.stream
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

    @property
    def is_claimed(self) -> bool:
        return False

    def is_complete(self) -> bool:
        return bool(self._done.query())

    def lend(self) -> None:
        """Nothing to order: the host saw the gather complete, so work queued from now on reads what it wrote."""
        self._current_stream()

    def give_back(self) -> None:
        self._returned.record(self._current_stream())

    def is_idle(self) -> bool:
        return bool(self._returned.query())

    def _current_stream(self) -> torch.cuda.Stream:
        """The caller's current stream, where a batch is read: its memory is not used again before the work that is queued there.

        Its object is looked up by the raw handle: making a new one each time costs 5 us.
        """
        handle = torch._C._cuda_getCurrentRawStream(self._device_index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self._device)
            self._memory.block.record_stream(stream)
        return stream


class CudaGather(_StreamGather):
    """Ring and batch on one GPU: the parameters are copied from pinned memory, the recipe replayed as one CUDA graph.

    Gathers of one stream share its graph pool: their graphs run one after the other, and leave nothing behind in it.
    """

    def __init__(self, memory: BatchBuffer, side: SideStream, how: HowToRun = plain) -> None:
        super().__init__(memory, side)
        self._how = how
        self._parameters = pinned_words(PARAMETERS)
        self._host = self._parameters.numpy()
        self._recipe: Recipe | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def bind(self, ring: RingTensors) -> None:
        with torch.cuda.stream(self._stream):
            self._recipe = Recipe(self._memory, ring, take_by_torch, self._how)  # here: the fills of its memory come before its steps
            self._stream.wait_event(self._returned)  # a batch of the last ring may still be read by queued work
            Parameters(0, 0, 1).write_to(self._host)
            counts = self._memory.write_back.counts.clone()
            self._follow()  # loads the kernels, which a capture must not; row 0 is read without a lease and thrown away
            self._memory.write_back.counts.copy_(counts)
            self._stream.synchronize()
            self._graph = self._capture()

    def unbind(self) -> None:
        super().unbind()
        self._side.last_graph = self._graph or self._side.last_graph
        self._recipe = self._graph = None

    def submit(self, parameters: Parameters) -> None:
        parameters.write_to(self._host)  # the copy that read it before is complete: so is its gather
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._returned)
            if self._graph is not None:
                self._graph.replay()
            else:
                self._follow()
            self._done.record(self._stream)

    def _follow(self) -> None:
        recipe, memory = self._recipe, self._memory
        if recipe is None:
            raise RuntimeError("a gather without a ring")
        memory.drawn.parameters.copy_(self._parameters, non_blocking=True)
        recipe()
        memory.write_back.show_all()

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """Captures in thread-local mode: other threads may use CUDA meanwhile. None, with a warning, where capture fails.

        Only in the caller's thread: while a capture runs, torch refuses CUDA random numbers in every other thread.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self._side.graph_pool, capture_error_mode="thread_local")
            try:
                self._follow()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            warnings.warn(f"draw and gather run without a CUDA graph, 50 to 100 us slower a batch: {error}", RuntimeWarning, stacklevel=2)
            return None
        return graph


class StagedGather(_StreamGather):
    """Ring in host memory, batch on a GPU: gathered on the CPU into pinned memory, then copied."""

    def __init__(self, memory: BatchBuffer, side: SideStream, how: HowToRun = plain) -> None:
        super().__init__(memory, side)
        self._host = BatchBuffer(memory.number, memory.schema, memory.request, torch.device("cpu"), pin_memory=True)
        self.write_backs = (memory.write_back, self._host.write_back)
        self._fill = _HostFill(self._host, how)

    def bind(self, ring: RingTensors) -> None:
        self._fill.bind(ring)

    def unbind(self) -> None:
        super().unbind()
        self._fill.unbind()

    def give_back(self) -> None:
        self._host.write_back.copy_(self._memory.write_back)
        super().give_back()

    def submit(self, parameters: Parameters) -> None:
        self._fill(parameters)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._returned)
            self._memory.block.copy_(self._host.block, non_blocking=True)
            self._done.record(self._stream)
