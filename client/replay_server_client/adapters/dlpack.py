"""Batches for JAX, CuPy and numpy, by DLPack: fields in compact memory, and the two rules that keep their streams in order.

```
torch's current stream   gather ─► compact copy ─► │ from_dlpack │                ┌─► next sample(): gathers into this batch's buffer again
consumer's stream                                  └─ rule 1 ─► │ its kernels │ ──┘ rule 2
```
1. *Reading comes after the copy.* ``__dlpack__(stream=...)``, which every ``from_dlpack`` calls, lets the consumer's stream wait for
   torch's current one. Nothing to do.
2. *The next gather comes after the reading.* ``sample()`` waits for torch's current stream and knows no other. CuPy: give
   ``wait_for_stream(stream.ptr)`` the stream that reads, before the next ``sample()``. JAX tells no stream: ``jax.block_until_ready`` what
   was computed of the batch, before the next ``sample()``. On the CPU the same holds for JAX, which computes in threads of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from replay_server_protocol.errors import InvalidRequest, shown
from torch import Tensor

from replay_server_client.batch import Batch


def dlpack_fields(batch: Batch, *names: str) -> Mapping[str, Tensor]:
    """These fields (default: all) as contiguous tensors, which ``jax.dlpack``, ``cupy`` and ``numpy`` take by ``from_dlpack``.

    JAX refuses strided memory, so the views of the rows won't do. Copied on torch's current stream, into memory that stays the batch
    buffer's: a consumer's array may share it, and then holds until the next ``sample()`` of the request. Raises InvalidRequest for
    unknown names and a batch that has ended.
    """
    return {name: batch.compact(name) for name in names or batch.fields}


def wait_for_stream(stream: int, device: int | None = None) -> None:
    """Torch's current stream, and so the next ``sample()``, comes after all work queued on another library's CUDA stream so far.

    ``stream`` is its handle (CuPy: ``stream.ptr``), 0 the default stream; ``device`` the number of its GPU (default: the current one).
    Waits for nothing itself.
    """
    if isinstance(stream, bool) or not isinstance(stream, int) or stream < 0:
        raise InvalidRequest(f"stream={shown(stream)}: the handle of a CUDA stream, as cupy.cuda.Stream.ptr is")
    if not torch.cuda.is_available():
        raise InvalidRequest("wait_for_stream: torch sees no CUDA device; without one there is no stream to wait for")
    other = torch.cuda.ExternalStream(stream, device=device)
    torch.cuda.current_stream(device).wait_stream(other)
