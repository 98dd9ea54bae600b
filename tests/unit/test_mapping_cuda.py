"""Opening a ring's handle where the driver says at first that it is mapped already."""

from __future__ import annotations

import pytest

cudart = pytest.importorskip("cuda.bindings.runtime", reason="needs cuda-bindings: pip install replay-server[cuda]", exc_type=ImportError)

MAPPED, DONE = cudart.cudaError_t.cudaErrorAlreadyMapped, cudart.cudaError_t.cudaSuccess


@pytest.mark.parametrize(("answers", "expected"), [([DONE], DONE), ([MAPPED, MAPPED, DONE], DONE), ([MAPPED] * 50, MAPPED)])
def test_a_handle_is_opened_again_while_the_driver_says_it_is_mapped(
    monkeypatch: pytest.MonkeyPatch, answers: list[object], expected: object
) -> None:
    from replay_server_client import mapping_cuda

    left = list(answers)
    monkeypatch.setattr(mapping_cuda, "_OPEN_AGAIN_S", 0.0)
    monkeypatch.setattr(cudart, "cudaIpcOpenMemHandle", lambda handle, flags: (left.pop(0), 4096))
    monkeypatch.setattr(cudart, "cudaGetLastError", lambda: (DONE,))
    assert mapping_cuda._open(cudart.cudaIpcMemHandle_t()) == (expected, 4096)
    assert not left
