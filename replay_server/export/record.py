"""All that the exporter knows: the last report, and what it has added up from those before it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from replay_server.export.client_totals import ClientTotals
from replay_server.export.history import History, Point
from replay_server.export.reading import Report, clients, found, number
from replay_server.export.sample_age import SampleAge

COLLECTOR_KEYS = ("committed_rows", "rejected_rows")
LEARNER_KEYS = ("batches", "rows", "dropped")
REPORT_VERSION = 1
_FRESH_INTERVALS = 3
_FRESH_S = 5.0
_HEALTHY = ("waiting_for_schema", "serving")


@dataclass(frozen=True, slots=True)
class Look:
    """What one question to the status socket brought: a report, or why there is none.

    ``time_s`` counts from 1970 and is for people; ``at_s`` is monotonic, so ages survive a clock that is set.
    """

    time_s: float
    at_s: float
    report: Report | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What the page draws: the present look and the points it has not had yet."""

    look: Look
    restarts: int
    next_number: int
    points: list[Point]


class Record:
    """Written by the watch, read by the threads that answer; ``lock`` is held for either. Its memory is bounded."""

    def __init__(self, interval_s: float, most_names: int) -> None:
        self.lock = threading.Lock()
        self.look = Look(0.0, 0.0, None, "no question was asked yet")
        self.last_report: Report | None = None
        self.collectors = ClientTotals(COLLECTOR_KEYS, most_names)
        self.learners = ClientTotals(LEARNER_KEYS, most_names)
        self.sample_age = SampleAge()
        self.looks = {"answered": 0, "absent": 0}
        self.restarts = 0
        self._history = History(interval_s)
        self._fresh_s = max(_FRESH_S, _FRESH_INTERVALS * interval_s)

    def see(self, look: Look) -> None:
        """Takes one look in. A report of another version counts as none: its keys may mean something else."""
        version = found(look.report, "report_version")
        if look.report is not None and version != REPORT_VERSION:
            wrong = f"the server's report has version {version}, this exporter knows {REPORT_VERSION}: run both from one release"
            look = Look(look.time_s, look.at_s, None, wrong)
        with self.lock:
            self.looks["answered" if look.report is not None else "absent"] += 1
            if look.report is None:
                self._history.absent(look.time_s)
            else:
                self._take(look, look.report)
            self.look = look

    def view(self, after: int) -> View:
        with self.lock:
            return View(self.look, self.restarts, *self._history.after(after))

    def why_unhealthy(self, now_s: float) -> str | None:
        """None while the server answers and takes clients; ``now_s`` is monotonic."""
        with self.lock:
            look = self.look
        if look.report is None:
            return look.error or "no report"
        if now_s - look.at_s > self._fresh_s:
            return f"the last report is {now_s - look.at_s:.0f} s old"
        phase = found(look.report, "phase")
        return None if phase in _HEALTHY else f"phase {phase}"

    def _take(self, look: Look, report: Report) -> None:
        generation = number(report, "generation")
        if self.last_report is not None and number(self.last_report, "generation") != generation:
            self.restarts += 1
        self.collectors.see(generation, clients(report, "collectors"))
        sampled = self.learners.see(generation, clients(report, "learners"))
        ages_s = self.sample_age.see(look.at_s, report, sampled["rows"])
        self._history.see(look.time_s, report, ages_s)
        self.last_report = report
