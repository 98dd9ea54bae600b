"""What is known of a run while it goes on: episode returns from the collectors, everything else from the server's status report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reports import Episodes, Finished

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
    steps_at: list[int] = field(default_factory=list)  # the environment step at which each of them ended
    curve: list[tuple[int, float]] = field(default_factory=list)  # environment step, mean return of the last episodes
    last_report: Report = field(default_factory=dict)
    rows_written: int | None = None  # by the collectors' own count, once all have finished
    updates: int = 0

    def add(self, episodes: Episodes) -> None:
        self.returns += episodes.returns
        self.steps_at += [episodes.steps] * len(episodes.returns)
        if len(self.returns) >= EPISODES_MEANT:
            self.curve.append((episodes.steps, self.final_return))

    def look(self, report: Report, time_s: float) -> None:
        ring, rates = report["ring"], report["rates"]
        ratio = report["flow"]["samples_per_insert"]
        self.last_report = report
        self.updates = max(self.updates, sum(learner["batches"] for learner in report["learners"]))
        self.moments.append(
            Moment(
                time_s=time_s,
                env_steps=report["counters"]["rows_committed"],
                updates=self.updates,
                ring_fill=ring["size_rows"] / ring["capacity_rows"] if ring else 0.0,
                samples_per_insert=float("nan") if ratio is None else ratio,
                rows_per_s=rates["rows_per_s"],
                batches_per_s=rates["batches_per_s"],
            )
        )

    def finish(self, finished: Sequence[Finished], is_whole: bool) -> None:
        """Takes the exact counts of those who have finished: the report also counts batches made ready ahead."""
        self.updates = sum(part.updates for part in finished) or self.updates
        self.rows_written = sum(part.rows for part in finished) if is_whole else None

    @property
    def env_steps(self) -> int:
        return self.moments[-1].env_steps if self.moments else 0

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
            f"{now.time_s:6.1f} s  {now.env_steps:>7,} env steps  {now.updates:>7,} updates  return {shown(self.final_return):>8}  "
            f"ring {now.ring_fill:4.0%}  {shown(now.samples_per_insert):>6} samples/insert  {now.rows_per_s:5,.0f} rows/s"
        )


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def shown(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "-"


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
