"""The soak's report: the table by tenths of the time, drift with its limits, faults, and the plot over time."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmark import OURS, Report, Target, figure
from soaking.drift import Drift, Limit, drift_of
from soaking.gauges import KINDS, Gauges

PARTS = 10
SERVER_MEMORY, CLIENT_MEMORY = Limit(per_hour=8.0, noise=3.0), Limit(per_hour=30.0, noise=8.0)
COUNT, COUNT_BY_SESSION = Limit(per_hour=2.0, noise=0.9), Limit(per_hour=2.0, noise=3.0)
"""What the server holds for a session comes and goes with guests."""
DEVICE_MEMORY = Limit(per_hour=50.0, noise=20.0)
_WARM_UP = 0.15
_LOG_AXIS = " ms"


class SoakReport(Report):
    """A ``Report`` whose plot shows the gauges over time, and whose table ends with ``notes``."""

    notes: Sequence[str] = ()

    def add_gauges(self, gauges: Gauges) -> list[Drift]:
        """Series by tenths of the time, and the drift of each gauge after the warm-up."""
        looks = gauges.looks
        times = looks["t"]
        drifts = []
        for name, values in looks.items():
            if name == "t":
                continue
            unit, limit = _unit_and_limit(name)
            parts = [part for part in np.array_split(np.asarray(values, float), PARTS) if np.isfinite(part).any()]
            self.add(unit, name, OURS, unit, [float(np.nanmedian(part)) for part in parts])
            drift = drift_of(name, unit, times, values, _WARM_UP * times[-1], limit)
            drifts.append(drift)
            if limit is not None:
                self.targets.append(_target_of(drift))
        return drifts

    def table(self) -> str:
        return "\n\n".join((super().table(), *self.notes))

    def publish(self) -> None:
        super().publish()
        (self.options.output / f"{self.name}.txt").write_text(self.table() + "\n", "utf-8")

    def draw(self) -> Path | None:
        """None where matplotlib is not installed."""
        if importlib.util.find_spec("matplotlib") is None:
            return None
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        looks = self.raw["looks"]
        panels = {name: chosen for name, chosen in _panels(list(looks)).items() if chosen}
        figure_, axes = pyplot.subplots(len(panels), 1, sharex=True, squeeze=False, figsize=(10, 2.2 * len(panels)), layout="constrained")
        minutes = np.asarray(looks["t"]) / 60
        for axis, (title, chosen) in zip(axes[:, 0], panels.items(), strict=True):
            for name in chosen:
                axis.plot(minutes, np.asarray(looks[name], float), label=name, linewidth=1)
            if title.endswith(_LOG_AXIS):
                axis.set_yscale("log")
            axis.set_ylabel(title)
            axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
        axes[-1, 0].set_xlabel("minutes")
        figure_.suptitle(f"{self.name}, {self.options.device}")
        path = self.options.output / f"{self.name}.png"
        figure_.savefig(path, dpi=100)
        pyplot.close(figure_)
        return path


def describe(drifts: list[Drift]) -> str:
    """A line a gauge: where it stood, its slope, and what it may be."""
    lines = [f"{'drift after warm-up':24}  {'median':>12}  {'an hour':>12}  {'limit':>8}"]
    for drift in drifts:
        limit = f"{drift.limit.per_hour:g}" if drift.limit else "none"
        word = "  LEAKS" if drift.is_leak else ""
        lines.append(f"{drift.gauge:24}  {figure(drift.median):>12}  {drift.per_hour:>+12,.3g}  {limit:>8}{word}")
    return "\n".join(lines)


def _target_of(drift: Drift) -> Target:
    assert drift.limit is not None
    rise = drift.per_hour if drift.rise > drift.limit.noise else 0.0
    return Target(f"{drift.gauge}, rise an hour beyond noise", max(0.0, rise), at_most=drift.limit.per_hour)


def _unit_and_limit(name: str) -> tuple[str, Limit | None]:
    if name == "device memory MB":
        return "MB", DEVICE_MEMORY
    if name.endswith("RSS MB"):
        return "MB", SERVER_MEMORY if name.startswith("server") else CLIENT_MEMORY
    if name == "server fds" or name.startswith("segments"):
        return "count", COUNT_BY_SESSION
    if name.endswith(("fds", "threads")):
        return "count", COUNT
    return name.rpartition(" ")[2], None


def _panels(names: list[str]) -> dict[str, list[str]]:
    return {
        "private memory, MB": [name for name in names if name.endswith("RSS MB")],
        "device memory, MB": [name for name in names if name.startswith("device")],
        "open files": [name for name in names if name.endswith("fds")],
        "threads": [name for name in names if name.endswith("threads")],
        "segments, sessions": [name for name in names if name.startswith("segments") or name == "sessions"],
        "waits, ms": [f"{kind} p{percent} ms" for kind in KINDS for percent in (50, 99)] + ["status answer ms"],
        "rows/s": [f"{kind} rows/s" for kind in KINDS],
    }


def rounded(values: list[float]) -> list[float | None]:
    """For the record: JSON knows no NaN."""
    return [None if math.isnan(value) else float(f"{value:.5g}") for value in values]
