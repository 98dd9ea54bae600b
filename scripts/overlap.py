"""What a merged trace shows about overlap: work of tick N + 1 inside the window of update N, what touches a boundary, and a drawing.

The trace must come from one collector that adds SLOT_ROWS rows, one slot, in each update, and a learner that takes one batch after
each: then seqs and batch numbers tell ticks. A tick without a span of its own counts as outside.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench_ipc import SLOT_ROWS
from replay_server_protocol.trace import Event

WARM_UP_TICKS, DRAWN_TICKS = 20, 3
WORK = ("add", "copy", "commit", "gather")
_LINES = ("learner: update", "learner: boundary", "collector: add", "server: copy", "server: commit", "learner: gather")
_COLORS = ("tab:blue", "tab:orange", "tab:green")


@dataclass(frozen=True)
class Overlap:
    """Counts over the ticks after the warm-up.

    ``inside``: by kind of work, ticks N + 1 whose span lies inside update N. ``touched``: boundaries during which any add, copy, commit
    or gather was under way. ``fresh``: gathers whose window already held the rows added in the same update.
    """

    ticks: int
    inside: dict[str, int]
    boundaries_us: list[float]
    touched: int
    fresh: int

    @classmethod
    def of(cls, events: list[Event]) -> Overlap:
        numbered = {event["args"].get("tick", -1): event for event in _spans(events, "update")}
        updates = {tick: event for tick, event in numbered.items() if tick >= WARM_UP_TICKS}
        if not updates:
            raise SystemExit(
                f"this trace has no `update` with a `tick` after the {WARM_UP_TICKS} of warm-up; --read takes a trace of this script"
            )
        boundaries = [event for event in _spans(events, "boundary") if event["args"]["number"] - 1 in updates]
        work = _by_tick(events)
        everything = [event for name in ("write", "copy", "commit", "gather") for event in _spans(events, name)]
        gathers = work["gather"]
        return cls(
            ticks=len(updates),
            inside={kind: sum(_is_inside(work[kind].get(tick), update) for tick, update in updates.items()) for kind in WORK},
            boundaries_us=[event["dur"] for event in boundaries],
            touched=sum(any(_is_touching(event, boundary) for event in everything) for boundary in boundaries),
            fresh=sum(tick in gathers and gathers[tick]["args"]["committed"] >= (tick + 1) * SLOT_ROWS for tick in updates),
        )

    @property
    def median_us(self) -> float:
        return statistics.median(self.boundaries_us)

    @property
    def p99_us(self) -> float:
        return float(np.percentile(self.boundaries_us, 99))

    def percent(self, ticks: int) -> float:
        return 100 * ticks / self.ticks

    def lines(self) -> list[str]:
        """The counts as sentences."""
        return [
            *(f"{kind} of tick N+1 inside update N: {n} of {self.ticks} ({self.percent(n):.1f} %)" for kind, n in self.inside.items()),
            f"boundaries during which an add, copy, commit or gather was under way: {self.touched} of {len(self.boundaries_us)}",
            f"boundary: median {self.median_us:.1f} µs, p99 {self.p99_us:.1f} µs, longest {max(self.boundaries_us):.1f} µs",
            f"gathers that drew from the rows added in that update, too: {self.fresh} of {self.ticks}",
        ]


def draw(events: list[Event], path: Path) -> None:
    """A few ticks from the middle of the trace; the work of tick N + 1 has the colour of update N, which it should lie under."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    updates, work = _spans(events, "update"), _by_tick(events)
    boundaries = {event["args"]["number"] - 1: event for event in _spans(events, "boundary")}
    shown = updates[len(updates) // 2 :][:DRAWN_TICKS]
    ms_of = _milliseconds_from(shown[0]["ts"] - 200)
    figure, axis = pyplot.subplots(figsize=(11, 3.2), layout="constrained")

    def bar(event: Event, line: int, color: str) -> None:
        axis.broken_barh([(ms_of(event["ts"]), event["dur"] / 1e3)], (line - 0.35, 0.7), color=color, linewidth=1)

    for update in shown:
        tick = update["args"]["tick"]
        color = _COLORS[tick % len(_COLORS)]
        bar(update, 0, color)
        axis.text(ms_of(update["ts"] + update["dur"] / 2), 0, f"update {tick}", ha="center", va="center", color="white")
        if tick in boundaries:
            bar(boundaries[tick], 1, "black")
        for line, kind in enumerate(WORK, 2):
            event = work[kind].get(tick)
            if event is not None:
                bar(event, line, color)
                label = f"{kind} {tick + 1}: {event['dur']:,.0f} µs"
                axis.text(ms_of(_end_us(event)) + 0.03, line, label, va="center", fontsize=8)
    axis.set_yticks(range(len(_LINES)), _LINES)
    axis.invert_yaxis()
    axis.set(xlabel="ms", xlim=(0, ms_of(_end_us(shown[-1]) + 200)))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _milliseconds_from(origin_us: float) -> Callable[[float], float]:
    return lambda ts_us: (ts_us - origin_us) / 1e3


def _by_tick(events: list[Event]) -> dict[str, dict[int, Event]]:
    """The work of tick N + 1, by kind, under N: the update that it should lie in."""
    return {
        "add": dict(enumerate(_spans(events, "write"))),
        "copy": {event["args"]["first_seq"] // SLOT_ROWS: event for event in _spans(events, "copy")},
        "commit": {event["args"]["committed"] // SLOT_ROWS - 1: event for event in _spans(events, "commit")},
        "gather": {event["args"]["number"] - 1: event for event in _spans(events, "gather")},
    }


def _spans(events: list[Event], name: str) -> list[Event]:
    return sorted((event for event in events if event["ph"] == "X" and event["name"] == name), key=lambda event: event["ts"])


def _end_us(event: Event) -> float:
    end_us: float = event["ts"] + event["dur"]
    return end_us


def _is_inside(event: Event | None, window: Event) -> bool:
    return event is not None and window["ts"] <= event["ts"] and _end_us(event) <= _end_us(window)


def _is_touching(event: Event, window: Event) -> bool:
    return bool(event["ts"] < _end_us(window) and window["ts"] < _end_us(event))
