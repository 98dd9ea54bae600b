"""What ``top`` remembers from one report to the next, and the view that it draws. Pure: reports and times in, views out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replay_server.top.events import Client, clients_of, differences

MOST_EVENTS = 100
MOST_RATES = 200
REPORT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; ``clock`` is when this was noticed, as HH:MM:SS."""

    clock: str
    words: str


@dataclass(frozen=True, slots=True)
class View:
    """All that one picture shows. ``report`` is the last one there was, None before the first.

    ``missing`` says why there is no newer one, else None. ``row_rates`` and ``batch_rates``: a figure a report, oldest first.
    ``client_rates``: rows a second of each collector, batches a second of each learner, since the report before. ``events``: the last ones,
    oldest first, of all that ``happened``.
    """

    report: Mapping[str, Any] | None
    missing: str | None
    row_rates: Sequence[float]
    batch_rates: Sequence[float]
    client_rates: Mapping[Client, float]
    events: Sequence[Event]
    happened: int


class Watch:
    """Turns reports, or their absence, into views."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._report: Mapping[str, Any] | None = None
        self._taken_s = 0.0
        self._lost_s: float | None = None
        self._row_rates: deque[float] = deque(maxlen=MOST_RATES)
        self._batch_rates: deque[float] = deque(maxlen=MOST_RATES)
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._happened = 0

    def take(self, report: Mapping[str, Any], now_s: float, clock: str) -> View:
        """The view after a report that came at ``now_s`` (monotonic seconds), ``clock`` on the wall."""
        if report.get("report_version") != REPORT_VERSION:
            version = report.get("report_version")
            words = f"server {self._name} reports in version {version}, this top reads {REPORT_VERSION}: use the server's own top"
            return self._view(words, {})
        before, rates = self._report, dict[Client, float]()
        if before is not None:
            words_of = differences(before, report)
            if self._lost_s is not None and before["pid"] == report["pid"]:
                words_of.insert(0, f"the server answers again after {now_s - self._lost_s:.0f} s")
            self._tell(words_of, clock)
            if before["pid"] == report["pid"]:
                rates = _client_rates(before, report, now_s - self._taken_s)
        self._report, self._taken_s, self._lost_s = report, now_s, None
        self._row_rates.append(report["rates"]["rows_per_s"])
        self._batch_rates.append(report["rates"]["batches_per_s"])
        return self._view(None, rates)

    def miss(self, why: str, now_s: float, clock: str) -> View:
        """The view when no report came; ``why`` is told once, and how long it lasts every time."""
        if self._lost_s is None:
            self._lost_s = now_s
            if self._report is not None:
                self._tell([why], clock)
        return self._view(f"{why}, waiting for {now_s - self._lost_s:.0f} s", {})

    def _tell(self, happened: Sequence[str], clock: str) -> None:
        self._events.extend(Event(clock, words) for words in happened)
        self._happened += len(happened)

    def _view(self, missing: str | None, client_rates: Mapping[Client, float]) -> View:
        rates = tuple(self._row_rates), tuple(self._batch_rates)
        return View(self._report, missing, *rates, client_rates, tuple(self._events), self._happened)


def _client_rates(before: Mapping[str, Any], after: Mapping[str, Any], passed_s: float) -> dict[Client, float]:
    were, counted = clients_of(before), {"collectors": "committed_rows", "learners": "batches"}
    return {
        client: max(0, part[counted[client[0]]] - were[client][counted[client[0]]]) / passed_s
        for client, part in clients_of(after).items()
        if client in were and passed_s > 0
    }
