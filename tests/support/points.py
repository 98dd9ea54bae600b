"""Named points of the data path at which a process of a fault schedule stops itself. The product knows nothing of them.

Its functions are wrapped inside the process that is to stop, after the fork and before it begins: the code that runs is the product's
own, and a process without a point runs it untouched. Points: "send X" and "sent X", around the message X; and those of ``_PLACES``.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

_PLACES: dict[str, tuple[str, str, str, bool]] = {
    # name: module, class, function, whether the point lies after it
    "credit": ("replay_server_client.slots", "LentSlots", "credit", False),
    "granted": ("replay_server_client.prefetch", "Prefetch", "_parameters", False),  # the lease is open, nothing is read yet
    "gathered": ("replay_server_client.prefetch", "Prefetch", "_hand_in", False),  # seen complete; the clock is not read yet
    "lend": ("replay_server_client.sampler", "Sampler", "_lend", False),  # the clock was read, the lease is over; nobody has the batch yet
    "event seen": ("replay_server.ingress", "Ingress", "_commit", False),
}
_MEMORIES = (("replay_server.cpu_ring", "CpuRing"), ("replay_server.cuda_ring", "CudaRing"))


def arm(point: str, passes: int, is_armed: Callable[[], bool], reached: Callable[[], None]) -> None:
    """At the ``passes``-th time that this process comes to ``point`` it calls ``reached`` and stops until SIGCONT, if ``is_armed``."""
    passed = 0

    def pass_by() -> None:
        nonlocal passed
        passed += 1
        if passed == passes and is_armed():
            reached()
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread stops here; kill() might stop it later

    verb, _, message = point.partition(" ")
    if verb in ("send", "sent"):
        _wrap_sends(message, pass_by, is_after=verb == "sent")
    elif point in ("reserved", "submitted"):
        for module, kind in _MEMORIES:
            _wrap(module, kind, "submit", pass_by, is_after=point == "submitted")
    elif point == "gathering":
        _wrap_take(pass_by)
    else:
        module, kind, function, is_after = _PLACES[point]
        _wrap(module, kind, function, pass_by, is_after)


def _wrap(module: str, kind: str, function: str, pass_by: Callable[[], None], is_after: bool) -> None:
    owner = getattr(__import__(module, fromlist=[kind]), kind)
    original = getattr(owner, function)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if not is_after:
            pass_by()
        result = original(*arguments, **keywords)
        if is_after:
            pass_by()
        return result

    setattr(owner, function, wrapped)


def _wrap_sends(message: str, pass_by: Callable[[], None], is_after: bool) -> None:
    """Of the client and of the server: a process sends as one of them."""
    for module, kind in (("replay_server_client.connection", "Connection"), ("replay_server.replay", "Replay")):
        owner = getattr(__import__(module, fromlist=[kind]), kind)
        setattr(owner, "send", _sender(owner.send, message, pass_by, is_after))  # noqa: B010 - a method of the product


def _sender(original: Callable[..., Any], message: str, pass_by: Callable[[], None], is_after: bool) -> Callable[..., Any]:
    def send(*arguments: Any) -> Any:
        is_meant = type(arguments[-1]).__name__ == message
        if is_meant and not is_after:
            pass_by()
        result = original(*arguments)
        if is_meant and is_after:
            pass_by()
        return result

    return send


def _wrap_take(pass_by: Callable[[], None]) -> None:
    """In the middle of a gather: half of its rows are read before the stop, half after it."""
    from replay_server_client import gather

    def take_halves(ring_rows: Any, indices: Any, batch_rows: Any) -> Callable[[], None]:
        half = len(indices) // 2
        first, second = (original(ring_rows, indices[part], batch_rows[part]) for part in (slice(half), slice(half, None)))

        def step() -> None:
            first()
            pass_by()
            second()

        return step

    original, gather.take_by_numpy = gather.take_by_numpy, take_halves  # type: ignore[attr-defined]
