"""What is known of a run while it goes on: episode returns from the collectors, everything else from the server's status report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reports import Episodes

EPISODES_MEANT = 20

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Moment:
    """One look at the status report, ``time_s`` after the start. ``samples_per_insert`` is NaN before the first row that counts."""

    time_s: float
    env_steps: int
    updates: int
    ring_fill: float  # 0 to 1
    samples_per_insert: float
    rows_per_s: float
    batches_per_s: float


@dataclass
class Record:
    """Grows by ``add`` and ``look``; the summary and the picture read it."""

    moments: list[Moment] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)  # in the order in which episodes ended
    steps_at: list[int] = field(default_factory=list)  # environment steps of all collectors when each of them ended
    last_report: Report = field(default_factory=dict)
    _rows: dict[int, int] = field(default_factory=dict)

    def add(self, episodes: Episodes) -> None:
        self._rows[episodes.collector] = episodes.rows
        self.returns += episodes.returns
        self.steps_at += [sum(self._rows.values())] * len(episodes.returns)

    def look(self, report: Report, time_s: float) -> None:
        ring, rates = report["ring"], report["rates"]
        ratio = report["flow"]["samples_per_insert"]
        self.last_report = report
        self.moments.append(
            Moment(
                time_s=time_s,
                env_steps=report["counters"]["rows_committed"],
                updates=max(self.updates, sum(learner["batches"] for learner in report["learners"])),
                ring_fill=ring["size_rows"] / ring["capacity_rows"] if ring else 0.0,
                samples_per_insert=float("nan") if ratio is None else ratio,
                rows_per_s=rates["rows_per_s"],
                batches_per_s=rates["batches_per_s"],
            )
        )

    @property
    def env_steps(self) -> int:
        return self.moments[-1].env_steps if self.moments else 0

    @property
    def updates(self) -> int:
        return self.moments[-1].updates if self.moments else 0

    @property
    def first_return(self) -> float:
        """Mean return of the first episodes, played at random; NaN before the first ended."""
        return mean(self.returns[:EPISODES_MEANT])

    @property
    def final_return(self) -> float:
        """Mean return of the last episodes; NaN before the first ended."""
        return mean(self.returns[-EPISODES_MEANT:])

    def progress(self) -> str:
        """The run in one line."""
        now = self.moments[-1]
        return (
            f"{now.time_s:6.1f} s  {now.env_steps:>7,} env steps  {now.updates:>7,} updates  return {self.final_return:8.1f}  "
            f"ring {now.ring_fill:4.0%}  {now.samples_per_insert:6.1f} samples/insert  {now.rows_per_s:5,.0f} rows/s"
        )


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def rows_balance(report: Report) -> dict[str, int]:
    """Where every published row is, from one status report: the first number must be the sum of the others."""
    counters = report["counters"]
    return {
        "published": counters["rows_published"],
        "committed": counters["rows_committed"],
        "rejected": counters["rows_rejected"],
        "lost": counters["rows_lost"],
        "in flight": counters["rows_in_flight"],
    }


def is_conserved(balance: Mapping[str, int]) -> bool:
    return 2 * balance["published"] == sum(balance.values())
