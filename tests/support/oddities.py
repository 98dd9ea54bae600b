"""Values that callers pass by mistake, or to see what happens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


class Unprintable:
    """Its repr raises, and it is equal to nothing."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def oddities() -> Iterator[Any]:
    """One of each kind; made anew each time, since callees may keep them."""
    itself: list[Any] = []
    itself.append(itself)
    around: dict[str, Any] = {}
    around["a"] = around
    yield from (None, True, 0, 1, 3, -1, 2**31, 2**63, 10**400, 16**5000, 0.5, -0.5, float("nan"), float("inf"), 1e308, 1j)
    yield from ("", "x", "a b", "a\0b", "\udcff", "x" * 5000, "../x", "cuda:9", "cuda:²", "9" * 5000, b"", b"x", b"\xff" * 300)
    yield from (
        [],
        [1],
        ["x"],
        [[1], [2, 3]],
        itself,
        (),
        ("float32", -1),
        ("float32", "x"),
        {},
        {"a": 1},
        {1: 2},
        around,
        {3},
        frozenset(),
    )
    yield from (np.zeros(3), np.zeros((2, 2), object), np.float32("nan"), np.int64(3), np.array(3), np.array(["x"]))
    yield from (object(), Unprintable(), int, len, iter([]), range(3), lambda: None, NotImplementedError())
