"""The device memory of the whole GPU as this process sees it, and a first use of everything that CUDA makes once and keeps."""

from __future__ import annotations

import time

import torch

MIB = 1 << 20
_WITHIN_S = 15.0
_ASK_AGAIN_S = 0.02
_SETTLED_S = 1.0


def warm_up() -> None:
    """Makes the context, and loads what captures, pinned memory and high-priority streams need: descriptors and memory that stay."""
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device, priority=-1)
    rows = torch.zeros((64, 16), dtype=torch.uint8, device=device)
    chosen = torch.arange(8, device=device)
    pinned = torch.zeros(8, dtype=torch.int64, pin_memory=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        rows.index_select(0, chosen)
        chosen.copy_(pinned, non_blocking=True)
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        chosen.add_(0)
        graph.capture_end()
        graph.replay()
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()


def used_bytes() -> int:
    """Memory in use on the current GPU, by every process; what torch merely keeps is given back first."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


def settled_bytes(within_s: float = _WITHIN_S) -> int:
    """Memory in use before a test begins: once it has stopped falling, for processes that ended before may still be giving theirs back."""
    end = time.monotonic() + within_s
    least, since = used_bytes(), time.monotonic()
    while (now := time.monotonic()) < since + _SETTLED_S and now < end:
        time.sleep(_ASK_AGAIN_S)
        if (used := used_bytes()) < least:
            least, since = used, now
    return least


def wait_used_at_most(limit_bytes: int, within_s: float = _WITHIN_S) -> int:
    """Memory in use once it is at most ``limit_bytes``; the driver takes a dead process's memory back in its own time."""
    end = time.monotonic() + within_s
    while (used := used_bytes()) > limit_bytes:
        assert time.monotonic() < end, f"{used:,} bytes of device memory in use, {limit_bytes:,} expected at most"
        time.sleep(_ASK_AGAIN_S)
    return used
