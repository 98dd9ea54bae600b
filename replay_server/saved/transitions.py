"""Transitions out of arrays in step: whole rows with their next observation, in runs that each belong to one stretch of time.

Where a file has no next observations they are the observations that follow:

* one observation more than rows in every episode (Minari's way, episode after episode): the last one is the next of the last row;
* as many as rows: nobody knows what came after an episode's last row. It is left out if it was truncated; where it was terminated, its
  own observation stands in, which nothing may use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from replay_server_protocol.errors import InvalidRequest

from replay_server.saved.offline import ArrayFile, Values, is_observation, rows_of

_ENDS = ("terminated", "truncated")

Run = Mapping[str, Values]
"""Rows in the order of time."""


class Transitions:
    """The rows of one file; ``fields`` are (dtype, shape) by name, ``rows`` what it has, ``left_out`` those without a next observation."""

    def __init__(self, file: ArrayFile, path: Path, *, has_next: bool) -> None:
        """``has_next``: rows need a next observation, and the file says where episodes end."""
        self._file = file
        self.rows = rows_of(file.arrays, path)
        self.left_out = 0
        self._is_cut = False
        self.fields = {name: (array.dtype, array.shape) for name, array in file.arrays.items()}
        self._observations = [name for name in file.arrays if is_observation(name)]
        self._derives = has_next and bool(self._observations) and not any(name.partition(".")[0] == "next_obs" for name in file.arrays)
        counts = {file.arrays[name].rows for name in self._observations}
        self._is_longer = counts != {self.rows} and bool(counts)
        self._observation_rows = max(counts, default=self.rows)
        if len(counts) > 1 or self._observation_rows < self.rows or (self._is_longer and not self._derives):
            raise InvalidRequest(f"{path}: {', '.join(self._observations)} have other numbers of rows than the {self.rows:,} of the rest")
        if self._derives:
            for name in self._observations:
                self.fields[_next(name)] = self.fields[name]

    def runs(self, most_rows: int) -> Iterator[tuple[Run, bool]]:
        """All rows, at most ``most_rows`` at a time, and whether a row was left out just before: then the chain is cut there."""
        left, kept = self.rows, {name: self._file.read(name, 1) for name in self._observations} if self._derives and self.rows else {}
        used = 1
        while left:
            n = min(most_rows, left)
            rows: dict[str, Values] = {name: self._file.read(name, n) for name in self.fields if self._is_read(name)}
            if not self._derives:
                yield rows, False
            else:
                ends = _ends(rows)
                longer = int(ends.sum()) if self._is_longer else 0
                ahead = min(n + longer, self._observation_rows - used)
                if self._is_longer and ahead < n + longer - 1:
                    raise InvalidRequest("observations end before the episodes do: one more than rows is needed in each")
                seen = {name: np.concatenate([kept[name], self._file.read(name, ahead)]) for name in self._observations}
                used += ahead
                kept = {name: values[-1:] for name, values in seen.items()}
                yield from self._with_next(rows, ends, seen)
            left -= n

    def _is_read(self, name: str) -> bool:
        return name in self._file.arrays and not (self._derives and name in self._observations)

    def _with_next(self, rows: dict[str, Values], ends: npt.NDArray[np.bool_], seen: Mapping[str, Values]) -> Iterator[tuple[Run, bool]]:
        n, n_seen = len(ends), len(next(iter(seen.values())))
        here = np.arange(n) + (np.cumsum(ends) - ends if self._is_longer else 0)
        after = np.minimum(here + 1, n_seen - 1)
        is_known = np.ones(n, np.bool_)
        if not self._is_longer:
            terminated = rows["terminated"].reshape(n).astype(bool) if "terminated" in rows else np.zeros(n, np.bool_)
            after = np.where(ends, here, after)
            is_known = np.where(ends, terminated, here + 1 < n_seen)
        for name, values in seen.items():
            rows[name], rows[_next(name)] = values[here], values[after]
        self.left_out += int(n - is_known.sum())
        for run in np.split(np.arange(n), np.flatnonzero(~is_known) + 1):
            known = run[is_known[run]]
            if len(known):
                yield {name: values[known] for name, values in rows.items()}, self._is_cut
                self._is_cut = False
            self._is_cut |= len(known) < len(run)


def _ends(rows: Mapping[str, Values]) -> npt.NDArray[np.bool_]:
    found = [rows[name].reshape(len(rows[name]), -1).any(1) for name in _ENDS if name in rows]
    ends: npt.NDArray[np.bool_] = np.logical_or.reduce(found)
    return ends


def _next(name: str) -> str:
    head, dot, rest = name.partition(".")
    return f"next_{head}{dot}{rest}"
