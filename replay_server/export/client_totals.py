"""Sums per client name that only rise, under a bounded number of names."""

from __future__ import annotations

from collections.abc import Sequence

from replay_server.export.reading import Report, number

OTHER = "other"
"""What clients count under once the names are used up, and the one name that is there from the start."""


class ClientTotals:
    """Collectors or learners: what each name has done over all its sessions that were seen.

    A session's own sums start at 0 and go with it; here they are added up, so that no reconnect lowers a sum. The first ``most_names``
    names that come keep their place for good; later ones share ``other``.
    """

    def __init__(self, keys: Sequence[str], most_names: int) -> None:
        self.keys = tuple(keys)
        self.totals: dict[str, dict[str, float]] = {OTHER: dict.fromkeys(self.keys, 0.0)}
        self._most_names = most_names
        self._last: dict[tuple[float, str, float], dict[str, float]] = {}

    def see(self, generation: float, clients: Sequence[Report]) -> dict[str, float]:
        """Adds what was done since the last look; returns the increase of each key over all clients."""
        now: dict[tuple[float, str, float], dict[str, float]] = {}
        for client in clients:  # two sessions of one process may have one name
            sums = now.setdefault((generation, str(client.get("name")), number(client, "pid")), dict.fromkeys(self.keys, 0.0))
            for key in self.keys:
                sums[key] += number(client, key)
        risen = dict.fromkeys(self.keys, 0.0)
        for session, sums in now.items():
            last = self._last.get(session, {})
            total = self.totals.setdefault(self.label(session[1]), dict.fromkeys(self.keys, 0.0))
            for key in self.keys:
                before = last.get(key, 0.0)
                more = sums[key] - before if sums[key] >= before else sums[key]  # fallen: a new session of that process
                total[key] += more
                risen[key] += more
        self._last = now
        return risen

    def label(self, name: str) -> str:
        """``name`` itself while there is room for it, else ``other``."""
        return name if name in self.totals or len(self.totals) <= self._most_names else OTHER
