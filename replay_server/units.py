"""Figures with their unit as people read them: bytes, counts, durations; and numbers with a noun."""

from __future__ import annotations

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(n_bytes: float) -> str:
    """With a binary unit and three digits: ``1.68 MiB``."""
    unit = 0
    while n_bytes >= 1024 and unit < len(_BYTES) - 1:
        n_bytes, unit = n_bytes / 1024, unit + 1
    return f"{n_bytes:.0f} B" if unit == 0 else f"{n_bytes:.3g} {_BYTES[unit]}"


def human_count(number: int | None) -> str:
    """In at most nine characters: all digits below ten million, else four of them and a unit."""
    if number is None:
        return "-"
    if number < 10_000_000:
        return f"{number:,}"
    power = min((len(str(number)) - 1) // 3, 6)
    return f"{number / 1000**power:.4g} {'kMGTPE'[power - 1]}"


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number with its noun: ``1 slot``, ``2,000 slots``, ``0 copies``."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def human_seconds(seconds: float) -> str:
    """In at most eight characters: ``12 µs``, ``3.4 ms``, ``2.5 s``, ``16.7 min``, ``17 h``."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.{1 if seconds < 9.95e-3 else 0}f} ms"
    if seconds < 1_000:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 60_000 else f"{seconds / 3600:.0f} h"
