"""For tests: everything CUDA did in the daemon while it served, told by a profiler that runs inside it (``--debug-profile FILE``)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from replay_server_protocol.errors import InvalidRequest


@contextmanager
def recorded(file: str | None) -> Iterator[None]:
    """Writes the block's kernels, copies, memsets and runtime calls to ``file`` as a Chrome trace; None records nothing.

    Takes the profiler of torch, which the daemon imports here and nowhere else, by name, so that the rule against it holds for all other
    code. Raises InvalidRequest where torch or its CUDA is missing.
    """
    if file is None:
        yield
        return
    try:
        torch, profiler = importlib.import_module("torch"), importlib.import_module("torch.profiler")
    except ImportError as error:
        raise InvalidRequest(f"--debug-profile needs torch in the server's environment: {error}") from error
    if not torch.cuda.is_available():
        raise InvalidRequest("--debug-profile needs a torch that sees the GPU")
    torch.cuda.init()
    torch.cuda.synchronize()  # torch's own start-up is no part of the record
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as recording:
        yield
    recording.export_chrome_trace(file)
