"""Returns and lengths of the episodes that ended in committed rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from replay_server_protocol.episodes import LAST_EPISODES, EndedEpisodes

from replay_server.running import Running


class EpisodeTally:
    """Moments over all episodes, and means over the last ones, in order of commit."""

    def __init__(self) -> None:
        self._returns = Running()
        self._lengths = Running()
        self._last: deque[tuple[float, float]] = deque(maxlen=LAST_EPISODES)

    def merge(self, ended: EndedEpisodes) -> None:
        self._returns.merge(*ended.returns)
        self._lengths.merge(*ended.lengths)
        self._last.extend(ended.last)

    @property
    def parts(self) -> dict[str, object]:
        """Plain numbers from which ``restore`` makes it again."""
        return {
            "returns": list(self._returns.parts or ()),
            "lengths": list(self._lengths.parts or ()),
            "last": [list(episode) for episode in self._last],
        }

    def restore(self, parts: Mapping[str, Any]) -> None:
        """Adds what ``parts`` of another tally say. Raises TypeError, ValueError or KeyError for anything else."""
        for running, part in ((self._returns, parts["returns"]), (self._lengths, parts["lengths"])):
            if part:
                count, *numbers = part
                running.merge(int(count), *map(float, numbers))
        self._last.extend((float(total), float(length)) for total, length in parts["last"])

    def report(self) -> dict[str, object]:
        """count, return, length {mean, std, min, max}, and last {count, mean_return, mean_length}; null before the first episode."""
        n = len(self._last)
        returns, lengths = zip(*self._last, strict=True) if n else ((), ())
        return {
            "count": self._returns.count,
            "return": self._returns.report(),
            "length": self._lengths.report(),
            "last": {
                "count": n,
                "mean_return": sum(part / n for part in returns) if n else None,
                "mean_length": sum(lengths) / n if n else None,
            },
        }
