"""How many versions behind the newest posted one committed rows were, when they were committed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_MOST_BUCKETS = 22  # 0, 1, 2, 4, … 2**20; what is beyond has no bound


class Staleness:
    """Rows by staleness, in buckets that double: bucket 0 is fresh rows, bucket k up to 2**(k-1) versions behind."""

    def __init__(self) -> None:
        self._rows = [0] * (_MOST_BUCKETS + 1)
        self._count = 0
        self._sum = 0
        self._most: int | None = None

    def note(self, newest: int | None, versions: Iterable[tuple[int, int]]) -> None:
        """Rows by version (version, rows). Nothing is noted while nothing was posted (``newest`` None); a version ahead counts as fresh."""
        if newest is None:
            return
        for version, rows in versions:
            behind = max(0, newest - version)
            self._rows[min((behind - 1).bit_length() + 1 if behind else 0, _MOST_BUCKETS)] += rows
            self._count += rows
            self._sum += behind * rows
            self._most = max(self._most or 0, behind)

    @property
    def parts(self) -> dict[str, object]:
        """Plain numbers from which ``restore`` makes it again."""
        return {"rows": list(self._rows), "count": self._count, "sum": self._sum, "most": self._most}

    def restore(self, parts: Mapping[str, Any]) -> None:
        """Becomes what ``parts`` say. Raises TypeError, ValueError or KeyError for anything else."""
        rows, most = [int(n) for n in parts["rows"]], parts["most"]
        if len(rows) != len(self._rows):
            raise ValueError(f"{len(rows)} buckets of staleness")
        self._rows, self._count, self._sum, self._most = rows, int(parts["count"]), int(parts["sum"]), None if most is None else int(most)

    def report(self) -> dict[str, object]:
        """buckets [{le, rows}] up to the last one with rows (le null: beyond the largest bound), mean, max; null before the first row."""
        used = max((k + 1 for k, rows in enumerate(self._rows) if rows), default=0)
        bounds = [0, *(1 << k for k in range(_MOST_BUCKETS - 1)), None]
        return {
            "buckets": [{"le": bounds[k], "rows": self._rows[k]} for k in range(used)],
            "mean": self._sum / self._count if self._count else None,
            "max": self._most,
        }
