"""The one door to the CUDA runtime: every return code is checked, every failure becomes a DeviceError that names the call.

The daemon needs no torch. ``cuda.bindings`` is imported when a device is first asked for, never before. Addresses are plain integers,
streams and events are the bindings' own objects. All calls of one runtime come from one thread.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import uuid
from dataclasses import dataclass
from typing import Any, NewType

from replay_server_protocol.errors import BudgetExceeded, DeviceError

Stream = NewType("Stream", object)
Event = NewType("Event", object)

INSTALL = "install it with: pip install 'replay-server[cuda]', or serve with --device cpu"
IPC_HANDLE_BYTES = 64

_OUT_OF_MEMORY, _OLD_DRIVER, _NO_DEVICE, _BAD_DEVICE, _NOT_READY = 2, 35, 100, 101, 600
_REMEDIES = {
    _OUT_OF_MEMORY: "memory or the limit on pinned memory is used up (see ulimit -l, and who else uses the GPU)",
    _OLD_DRIVER: "there is no NVIDIA driver, or it is older than CUDA 13 needs (580); update it, or serve with --device cpu",
    46: "another process holds the GPU in exclusive mode; set its compute mode to default",
    _NO_DEVICE: "no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES, or serve with --device cpu",
    _BAD_DEVICE: "there is no such device; nvidia-smi -L lists those there are",
    201: "the handle belongs to this very process, or both processes have the same pid in their containers",
    700: "the CUDA context is lost; restart the server",
    712: "the memory is registered already",
    713: "the memory is not registered",
    719: "the CUDA context is lost; restart the server",
    801: "this platform does not support it (WSL, MIG and Tegra have no IPC); serve with --storage host",
    802: "the GPU's fabric is not ready yet; try again when nvidia-fabricmanager runs",
}


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One visible GPU. ``uuid`` compares with ``str(torch.cuda.get_device_properties(i).uuid)``."""

    ordinal: int
    uuid: str
    name: str
    free_bytes: int
    total_bytes: int


class CudaRuntime:
    """The calls the ring needs. Raises DeviceError from each; ``copy``, ``record`` and ``is_done`` cost about a microsecond."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._copy_async = api.cudaMemcpyAsync
        self._record = api.cudaEventRecord
        self._query = api.cudaEventQuery
        self._to_device = api.cudaMemcpyKind.cudaMemcpyHostToDevice

    @classmethod
    def load(cls) -> CudaRuntime:
        """Imports the bindings (0.2 to 0.5 s) and makes sure that a driver and a GPU answer."""
        try:
            api = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise DeviceError(f"device cuda needs the package cuda-bindings, which can't be imported ({error}); {INSTALL}") from error
        runtime = cls(api)
        if runtime.device_count() == 0:
            raise DeviceError(f"cudaGetDeviceCount found none: {_REMEDIES[_NO_DEVICE]}", code=_NO_DEVICE)
        return runtime

    # devices

    def device_count(self) -> int:
        return int(self._call("cudaGetDeviceCount"))

    def set_device(self, ordinal: int) -> None:
        """Comes before anything else that touches a device: the first such call makes a context on the current one."""
        self._call("cudaSetDevice", ordinal)

    def identity(self, ordinal: int) -> tuple[str, str]:
        """UUID and name of a device; makes no context."""
        properties = self._call("cudaGetDeviceProperties", ordinal)
        return str(uuid.UUID(bytes=bytes(properties.uuid.bytes))), properties.name.decode(errors="replace").rstrip("\0")

    def device(self, ordinal: int) -> GpuDevice:
        """Describes a device and makes it the current one: asking for its free memory makes a context there (0.3 s)."""
        self.set_device(ordinal)
        identity, name = self.identity(ordinal)
        free_bytes, total_bytes = self._call("cudaMemGetInfo")
        return GpuDevice(ordinal, identity, name, int(free_bytes), int(total_bytes))

    def versions(self) -> tuple[int, int]:
        """The newest CUDA the driver can run, and that of the runtime, each as 1000 x major + 10 x minor."""
        return int(self._call("cudaDriverGetVersion")), int(self._call("cudaRuntimeGetVersion"))

    # memory

    def allocate(self, n_bytes: int) -> int:
        """Address of ``n_bytes`` on the current device. Raises BudgetExceeded if they are not free."""
        code, address = self._api.cudaMalloc(n_bytes)
        if code == _OUT_OF_MEMORY:
            self.clear_error()
            free_bytes, _ = self._call("cudaMemGetInfo")
            raise BudgetExceeded(
                f"the GPU has {int(free_bytes):,} bytes free, the ring needs {n_bytes:,}; lower --capacity, or serve with --storage host",
                needed_bytes=n_bytes,
                free_bytes=int(free_bytes),
            )
        self._check("cudaMalloc", code)
        return int(address)

    def deallocate(self, address: int) -> None:
        self._call("cudaFree", address)

    def zero(self, address: int, n_bytes: int) -> None:
        """Queues the zeros; the caller synchronises."""
        self._call("cudaMemset", address, 0, n_bytes)

    def read(self, address: int, n_bytes: int) -> bytes:
        """Copies device bytes to the host and waits for them; not for the data path."""
        content = ctypes.create_string_buffer(n_bytes)
        to_host = self._api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpy", ctypes.addressof(content), address, n_bytes, to_host)
        return content.raw

    def ipc_handle(self, address: int) -> bytes:
        """The 64 bytes by which another process maps the allocation that starts at ``address``."""
        handle = self._call("cudaIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)

    def open_ipc(self, handle: bytes) -> int:
        """Address here of the allocation that another process made ``handle`` of. The server itself never needs it; the doctor tries it."""
        wanted = self._api.cudaIpcMemHandle_t()
        wanted.reserved = handle
        return int(self._call("cudaIpcOpenMemHandle", wanted, self._api.cudaIpcMemLazyEnablePeerAccess))

    def close_ipc(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address)

    def allocate_pinned(self, n_bytes: int) -> int:
        """Address of ``n_bytes`` of page-locked host memory."""
        return int(self._call("cudaHostAlloc", n_bytes, self._api.cudaHostAllocPortable))

    def deallocate_pinned(self, address: int) -> None:
        self._call("cudaFreeHost", address)

    def pin(self, address: int, n_bytes: int) -> str | None:
        """Page-locks memory of others. Returns None, or why it could not be: copies from it are then slower, not wrong."""
        (code,) = self._api.cudaHostRegister(address, n_bytes, self._api.cudaHostRegisterPortable)
        if code == 0:
            return None
        self.clear_error()  # it stays pending otherwise, and the next innocent call raises it
        return self.describe("cudaHostRegister", int(code))

    def unpin(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    # order

    def create_stream(self) -> Stream:
        """A stream that never waits for the default stream."""
        return Stream(self._call("cudaStreamCreateWithFlags", self._api.cudaStreamNonBlocking))

    def destroy_stream(self, stream: Stream) -> None:
        self._call("cudaStreamDestroy", stream)

    def create_event(self) -> Event:
        return Event(self._call("cudaEventCreateWithFlags", self._api.cudaEventDisableTiming))

    def destroy_event(self, event: Event) -> None:
        self._call("cudaEventDestroy", event)

    def copy(self, address: int, source: int, n_bytes: int, stream: Stream) -> None:
        """Queues a copy to the device. It returns at once if ``source`` is pinned; otherwise the host may do part of the copy."""
        (code,) = self._copy_async(address, source, n_bytes, self._to_device, stream)
        if code != 0:
            self._check("cudaMemcpyAsync", code)

    def record(self, event: Event, stream: Stream) -> None:
        (code,) = self._record(event, stream)
        if code != 0:
            self._check("cudaEventRecord", code)

    def is_done(self, event: Event) -> bool:
        """True once everything queued before ``record`` is complete."""
        (code,) = self._query(event)
        if code == 0:
            return True
        if code == _NOT_READY:
            return False
        self._check("cudaEventQuery", code)
        return False

    def synchronize(self, stream: Stream | None = None) -> None:
        """Waits for the stream, or for all work of the current device."""
        if stream is None:
            self._call("cudaDeviceSynchronize")
        else:
            self._call("cudaStreamSynchronize", stream)

    # codes

    def clear_error(self) -> None:
        self._api.cudaGetLastError()

    def describe(self, call: str, code: int) -> str:
        """``call``, the code's name and text, and what to do about it."""
        error = self._api.cudaError_t(code)
        _, text = self._api.cudaGetErrorString(error)
        words = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
        return f"{call} answered {error.name} ({code}: {words}): {_REMEDIES.get(code, 'see the CUDA runtime documentation')}"

    def _call(self, call: str, *arguments: object) -> Any:
        """Runs ``call`` and returns what it gives beside its code: nothing, one value or a tuple."""
        code, *given = getattr(self._api, call)(*arguments)
        self._check(call, code)
        return given[0] if len(given) == 1 else tuple(given)

    def _check(self, call: str, code: Any) -> None:
        if code != 0:
            self.clear_error()
            raise DeviceError(self.describe(call, int(code)), call=call, code=int(code))


def has_nvidia_driver(folders: tuple[str, ...] = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")) -> bool:
    """Whether a driver is loaded, also WSL's or a Jetson's: without one no package helps."""
    return any(os.path.exists(path) for path in folders)


def probe_devices(only: int | None = None) -> list[GpuDevice]:
    """The visible GPUs, or the one with ordinal ``only``. Raises DeviceError saying what is missing: bindings, driver or GPU.

    Free memory is known only to a context, and each one takes 0.3 s and some hundred megabytes of its GPU until this process ends:
    a daemon asks for the device it will use.
    """
    runtime = CudaRuntime.load()
    count = runtime.device_count()
    if only is not None and not 0 <= only < count:
        raise DeviceError(f"device cuda:{only} was asked for, the visible ones are cuda:0 to cuda:{count - 1}", code=_BAD_DEVICE)
    return [runtime.device(ordinal) for ordinal in (range(count) if only is None else (only,))]
