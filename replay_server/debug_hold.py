"""For tests: copies that take longer, by a copy stream that waits for a word in host memory.

Not by a host function that sleeps on the stream: while one runs, the driver answers no query of an event and may keep a submission
waiting, so that a delayed daemon would stand still, not only its copies.
"""

from __future__ import annotations

import ctypes
import importlib
import threading

from replay_server_protocol.errors import DeviceError

from replay_server.cuda_runtime import CudaRuntime, Stream

_WORD_BYTES = 4


class StreamHold:
    """Lets a stream wait for times that begin when they are asked for, each counted by a thread of its own."""

    def __init__(self, runtime: CudaRuntime, stream: Stream) -> None:
        self._runtime = runtime
        self._driver = importlib.import_module("cuda.bindings.driver")
        self._stream = self._driver.CUstream(int(stream))  # type: ignore[call-overload]
        self._address = runtime.allocate_pinned(_WORD_BYTES)
        self._ended = ctypes.c_uint32.from_address(self._address)
        self._ended.value = 0
        self._begun = 0
        self._timers: list[threading.Timer] = []

    def hold(self, delay_s: float) -> None:
        """Everything queued later on the stream waits until ``delay_s`` from now. Returns at once."""
        self._begun += 1
        until = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        (code,) = self._driver.cuStreamWaitValue32(self._stream, self._address, self._begun, until)
        if code != 0:
            raise DeviceError(f"cuStreamWaitValue32 answered {code.name}", code=int(code))
        timer = threading.Timer(delay_s, self._end, (self._begun,))
        timer.daemon = True
        timer.start()
        self._timers = [*filter(threading.Thread.is_alive, self._timers), timer]

    def close(self) -> None:
        """Waits for the holds under way: their threads write to the word that is given back."""
        for timer in self._timers:
            timer.join()
        self._runtime.deallocate_pinned(self._address)

    def _end(self, number: int) -> None:
        self._ended.value = max(self._ended.value, number)
