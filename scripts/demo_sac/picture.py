"""The picture of a run: learning curve, ring fill with samples per insert, and rates."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from record import EPISODES_MEANT, Record

BLUE, ORANGE, GREY = "#1f5fa8", "#d9730d", "#8a8a8a"


def draw(record: Record, title: str, target: float, path: Path) -> None:
    """Writes the picture to ``path`` (PNG)."""
    matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.titlelocation": "left", "axes.titleweight": "bold"})
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    curve, fill, rates = figure.subplot_mosaic([["curve", "curve"], ["fill", "rates"]], height_ratios=[1.25, 1]).values()
    figure.suptitle(title, x=0.01, ha="left")
    draw_curve(curve, record, target)
    draw_fill(fill, record)
    draw_rates(rates, record)
    figure.savefig(path, dpi=120)


def draw_curve(axes: Axes, record: Record, target: float) -> None:
    axes.plot(record.steps_at, record.returns, ".", color=GREY, alpha=0.6, label="episode")
    by_step = dict(
        sorted(dict(record.curve).items())
    )  # lanes end their episodes together: the last mean of each step; collectors take turns
    axes.plot(list(by_step), list(by_step.values()), ".-", color=BLUE, linewidth=2, label=f"mean of the last {EPISODES_MEANT}")
    axes.axhline(target, color=ORANGE, linestyle="--", linewidth=1, label=f"target {target:g}")
    axes.set(title="Return", xlabel="environment steps", ylabel="undiscounted return of an episode")
    axes.spines["right"].set_visible(False)
    axes.legend(loc="lower right", frameon=False)


def draw_fill(axes: Axes, record: Record) -> None:
    times = [moment.time_s for moment in record.moments]
    axes.plot(times, [100 * moment.ring_fill for moment in record.moments], color=BLUE, linewidth=2)
    axes.set(title="Ring fill and samples per insert", xlabel="seconds", ylim=(0, 105))
    axes.set_ylabel("rows that can be sampled, % of capacity", color=BLUE)
    ratio = axes.twinx()
    ratio.plot(times, [moment.samples_per_insert for moment in record.moments], color=ORANGE)
    ratio.set_ylabel("rows sampled per row inserted", color=ORANGE)
    ratio.set_ylim(bottom=0)


def draw_rates(axes: Axes, record: Record) -> None:
    times = [moment.time_s for moment in record.moments]
    axes.plot(times, [moment.rows_per_s for moment in record.moments], color=BLUE)
    axes.set(title="Rates", xlabel="seconds")
    axes.set_ylabel("rows committed per second", color=BLUE)
    axes.set_ylim(bottom=0)
    batches = axes.twinx()
    batches.plot(times, [moment.batches_per_s for moment in record.moments], color=ORANGE)
    batches.set_ylabel("batches sampled per second", color=ORANGE)
    batches.set_ylim(bottom=0)
