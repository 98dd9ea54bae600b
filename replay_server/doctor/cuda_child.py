"""What the doctor tries on a GPU, in processes that may hang or die without harm: ``python -m replay_server.doctor.cuda_child VERB``.

```
devices             versions, and UUID and name of every GPU that CUDA shows
share ORDINAL       allocates, writes a pattern, tells handle and pattern, holds the memory until stdin ends
read UUID HANDLE    maps the handle on the GPU of that UUID and tells the bytes there
pin BYTES           page-locks shared memory
```
Each answers with one line of JSON; a failure ends with 1 and its message.
"""

from __future__ import annotations

import ctypes
import json
import secrets
import sys
from collections.abc import Callable
from typing import Any

from replay_server_protocol.errors import DeviceError, ReplayError
from replay_server_protocol.segment import Segment, segment_name

from replay_server.cuda_runtime import CudaRuntime

PATTERN_BYTES = 64
_ALLOCATION_BYTES = 2 << 20


def main(arguments: list[str]) -> int:
    verb, *rest = arguments
    try:
        _VERBS[verb](*rest)
    except ReplayError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


def _devices() -> None:
    runtime = CudaRuntime.load()
    driver, own = runtime.versions()
    devices = [runtime.identity(ordinal) for ordinal in range(runtime.device_count())]
    _tell(driver=driver, runtime=own, devices=[{"uuid": uuid, "name": name} for uuid, name in devices])


def _share(ordinal: str) -> None:
    runtime = CudaRuntime.load()
    device = runtime.device(int(ordinal))
    address = runtime.allocate(_ALLOCATION_BYTES)
    pattern = secrets.token_bytes(PATTERN_BYTES)
    stream = runtime.create_stream()
    source = ctypes.create_string_buffer(pattern, PATTERN_BYTES)
    runtime.copy(address, ctypes.addressof(source), PATTERN_BYTES, stream)
    runtime.synchronize(stream)
    _tell(uuid=device.uuid, name=device.name, handle=runtime.ipc_handle(address).hex(), pattern=pattern.hex())
    sys.stdin.read()
    runtime.deallocate(address)


def _read(uuid: str, handle: str) -> None:
    runtime = CudaRuntime.load()
    ordinals = [n for n in range(runtime.device_count()) if runtime.identity(n)[0] == uuid]
    if not ordinals:
        raise DeviceError(f"the GPU {uuid} that one process sees is not visible to the other")
    runtime.device(ordinals[0])
    address = runtime.open_ipc(bytes.fromhex(handle))
    _tell(pattern=runtime.read(address, PATTERN_BYTES).hex())
    runtime.close_ipc(address)


def _pin(n_bytes: str) -> None:
    runtime = CudaRuntime.load()
    runtime.device(0)
    segment = Segment.create(segment_name(f"doctor{secrets.token_hex(4)}", "pin"), int(n_bytes))
    segment.unlink()
    why_not = runtime.pin(segment.address, segment.n_bytes)
    if why_not is None:
        runtime.unpin(segment.address)
    segment.close()
    _tell(why_not=why_not)


def _tell(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


_VERBS: dict[str, Callable[..., None]] = {"devices": _devices, "share": _share, "read": _read, "pin": _pin}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
