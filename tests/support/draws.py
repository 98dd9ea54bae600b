"""The draw of every learner of this process made slow, on the host or on the device, to be late on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replay_server_client.draw import Drawn, draw_uniform

_CYCLES_A_SECOND = 2_000_000_000
"""At least as fast as any GPU's clock: a delay counted in cycles is never shorter than meant."""


def slow_draws(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """From now to the end of the test a sampler made in this process draws for at least ``seconds``; a CUDA graph captures that too."""

    def slow(drawn: Drawn, ring_rows: int, *function: Callable[..., tuple[Any, Any]]) -> None:
        if drawn.seqs.is_cuda:
            hold_stream(seconds)
        else:
            time.sleep(seconds)
        draw_uniform(drawn, ring_rows, *function)

    monkeypatch.setattr("replay_server_client.recipe.draw_uniform", slow)


def hold_stream(seconds: float) -> None:
    """Queues a kernel that runs for at least ``seconds`` on the current stream."""
    torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))
