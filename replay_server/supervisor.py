"""What a service supervisor (systemd) is told: ready, alive, stopping. Nothing where nobody asked to be told.

Each message is one datagram to the socket that ``NOTIFY_SOCKET`` names; sd_notify(3) is the protocol.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

_NEVER = float("inf")


class Supervisor:
    """Tells each thing once, ``alive`` at half the time that the supervisor allows between two signs of life. Never waits, never raises."""

    def __init__(self, address: str | None, alive_every_s: float = _NEVER) -> None:
        self._address = address
        self._alive_every_s = alive_every_s
        self._alive_at_s = 0.0
        self._told: str | None = None
        self._is_ready = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Supervisor:
        """The supervisor that NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID name; one that is told nothing without the first."""
        address = environment.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")):
            return cls(None)
        allowed_us, meant = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
        is_watched = allowed_us.isdigit() and int(allowed_us) > 0 and meant in ("", str(os.getpid()))
        return cls(address, int(allowed_us) / 2e6 if is_watched else _NEVER)

    def tell(self, phase: str, now_s: float, *, is_ready: bool) -> None:
        """From the loop's slow turn: that it turns is what the sign of life says. ``is_ready`` counts from the first time on."""
        if self._address is None:
            return
        is_due = self._alive_every_s < _NEVER and now_s >= self._alive_at_s
        lines = ["READY=1"] * (is_ready and not self._is_ready) + ["WATCHDOG=1"] * is_due
        lines += [f"STATUS={phase.replace('_', ' ')}"] * (phase != self._told)
        if not lines or not self._sends(*lines):
            return
        self._told = phase
        self._is_ready |= is_ready
        if is_due:
            self._alive_at_s = now_s + self._alive_every_s

    def stopping(self) -> None:
        """The server closes from here on."""
        self._sends("STOPPING=1")

    def _sends(self, *lines: str) -> bool:
        """False if nobody is there, or if the socket is full: then it is told again."""
        if self._address is None:
            return False
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as datagram:
                datagram.setblocking(False)
                datagram.sendto("\n".join(lines).encode(), address)
        except OSError:
            return False
        return True
