"""What every benchmark of this folder shares: options, a server of its own, runs side by side, one table, one record, one plot.

A benchmark measures *series*: one figure a run, several runs a side, the sides taking turns. It prints every run with median and
interquartile range, and writes NAME.json (with commit, machine, date and versions) and NAME.png to ``--output``. Until it is over, what
it has found so far is in NAME.partial.json: a run that is cut off leaves that.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from replay_server_client import Schema

from replay_server import ReplayServer

OURS = "replay-server"
ROW_FLOATS = 430
OBS, ACTION, CRITIC = 98, 29, 101

_PACKAGES = ("replay-server", "numpy", "torch", "pyzmq", "msgpack", "cuda-bindings", "unilab-rl")
_FIGURE_DIGITS = 4


@dataclass(frozen=True)
class Options:
    """``device`` is cpu or cuda; ``quick`` asks for small sizes that only show that the benchmark runs."""

    device: str
    runs: int
    quick: bool
    output: Path
    seed: int
    arguments: argparse.Namespace

    def pick(self, full: Any, quick: Any) -> Any:
        """``full``, or ``quick`` under --quick."""
        return quick if self.quick else full


@dataclass(frozen=True)
class Series:
    """Figures of one side: one a run, in the order of the runs. ``group`` names the plot's panel, ``what`` the thing measured."""

    group: str
    what: str
    side: str
    unit: str
    runs: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.percentile(self.runs, (25, 75))
        return float(low), float(high)


@dataclass(frozen=True)
class Target:
    """A promise with its figure: ``value`` must be ``at_most`` or ``at_least`` the limit."""

    what: str
    value: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_met(self) -> bool:
        return (self.at_most is None or self.value <= self.at_most) and (self.at_least is None or self.value >= self.at_least)

    def describe(self) -> str:
        limit = f"≤ {self.at_most:g}" if self.at_most is not None else f"≥ {self.at_least:g}"
        return f"{'met   ' if self.is_met else 'MISSED'}  {self.what}: {figure(self.value)} (target {limit})"


@dataclass
class Report:
    """Everything one benchmark found. ``raw`` keeps what is behind the figures: ticks, outputs of peers, status reports."""

    name: str
    options: Options
    series: list[Series] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    def measure(self, group: str, what: str, unit: str, sides: Mapping[str, Callable[[], float]]) -> None:
        """Runs every side ``options.runs`` times, taking turns, so that a drift of the machine meets all of them."""
        runs: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(self.options.runs):
            for side, run in sides.items():
                runs[side].append(run())
        for side, figures in runs.items():
            self.add(group, what, side, unit, figures)

    def add(self, group: str, what: str, side: str, unit: str, figures: Sequence[float]) -> None:
        self.series.append(Series(group, what, side, unit, list(figures)))
        self.keep()

    def find(self, what: str, side: str = OURS) -> Series | None:
        return next((series for series in self.series if (series.what, series.side) == (what, side)), None)

    def expect(self, what: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
        self.targets.append(Target(what, value, at_most, at_least))

    def expect_ratio(self, what: str, side: str, peer: str, *, at_most: float | None = None, at_least: float | None = None) -> None:
        """``side`` over ``peer``, by their medians; nothing where the peer did not run."""
        mine, theirs = self.find(what, side), self.find(what, peer)
        if mine and theirs:
            self.expect(f"{what}, {side} / {peer}", mine.median / theirs.median, at_most=at_most, at_least=at_least)

    def expect_ratio_of(self, what: str, to: str, *, at_most: float | None = None, at_least: float | None = None) -> None:
        """Our ``what`` over our ``to``, by their medians."""
        one, other = self.find(what), self.find(to)
        if one and other:
            self.expect(f"{what} / {to}", one.median / other.median, at_most=at_most, at_least=at_least)

    def keep(self, **raw: Any) -> None:
        """Writes what was found so far. Each of ``raw`` is appended to the list of its name there."""
        for name, found in raw.items():
            self.raw.setdefault(name, []).append(found)
        self._write(self._partial)

    def publish(self) -> None:
        """Prints the table and the targets, writes the record and the plot."""
        print(self.table())
        path = self.options.output / f"{self.name}.json"
        self._write(path)
        self._partial.unlink(missing_ok=True)
        print(f"\nwritten: {path}{', ' + str(plot) if (plot := self.draw()) else ''}")

    def table(self) -> str:
        head = ["what", "side", "unit", *(f"run {n + 1}" for n in range(self.options.runs)), "median", "IQR"]
        rows = [head]
        for series in self.series:
            low, high = series.quartiles
            figures = [figure(value) for value in series.runs]
            figures += [""] * (self.options.runs - len(figures))
            rows.append([series.what, series.side, series.unit, *figures, figure(series.median), f"{figure(low)} – {figure(high)}"])
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, "", *(target.describe() for target in self.targets)])

    @property
    def _partial(self) -> Path:
        return self.options.output / f"{self.name}.partial.json"

    def _write(self, path: Path) -> None:
        self.options.output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.record(), indent=1) + "\n", "utf-8")

    def record(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "quick": self.options.quick,
            "seed": self.options.seed,
            "device": self.options.device,
            "machine": machine(self.options.device),
            "series": [asdict(series) | {"median": series.median, "quartiles": series.quartiles} for series in self.series],
            "targets": [asdict(target) | {"is_met": target.is_met} for target in self.targets],
            "raw": self.raw,
        }

    def draw(self) -> Path | None:
        """A panel for each group: medians as bars, every run as a dot. None where matplotlib is not installed."""
        if importlib.util.find_spec("matplotlib") is None:
            return None
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        groups = list(dict.fromkeys(series.group for series in self.series))
        heights = [1 + sum(series.group == group for series in self.series) for group in groups]
        size = (9, 1 + 0.35 * sum(heights) + 0.5 * len(groups))
        figure_, axes = pyplot.subplots(len(groups), 1, squeeze=False, height_ratios=heights, figsize=size, layout="constrained")
        for axis, group in zip(axes[:, 0], groups, strict=True):
            members = [series for series in self.series if series.group == group]
            for place, series in enumerate(members):
                axis.barh(place, series.median, color="tab:blue" if series.side == OURS else "tab:gray", alpha=0.6)
                axis.plot(series.runs, [place] * len(series.runs), "k.", markersize=4)
            axis.set_yticks(range(len(members)), [f"{series.what} · {series.side}" for series in members])
            axis.invert_yaxis()
            axis.set(title=group, xlabel=members[0].unit)
        figure_.suptitle(f"{self.name}, {self.options.device}")
        path = self.options.output / f"{self.name}.png"
        figure_.savefig(path, dpi=110)
        pyplot.close(figure_)
        return path


def figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.{_FIGURE_DIGITS}g}"


def parse(description: str | None, extend: Callable[[argparse.ArgumentParser], object] | None = None) -> Options:
    """The options that all benchmarks have, and those that ``extend`` adds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the ring and the learner are (default: auto)"
    )
    parser.add_argument("--runs", type=int, default=None, help="runs a side (default: 5, with --quick 2)")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, its figures mean nothing")
    parser.add_argument(
        "--output", type=Path, default=Path("docs/evidence"), help="folder of the record and the plot (default: docs/evidence)"
    )
    parser.add_argument("--seed", type=int, default=1)
    if extend:
        extend(parser)
    given = parser.parse_args()
    device = given.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Options(device, given.runs or (2 if given.quick else 5), given.quick, given.output, given.seed, given)


@functools.cache
def machine(device: str) -> dict[str, Any]:
    """Commit, date, hardware and versions, as far as this machine tells them."""
    found: dict[str, Any] = {
        "commit": os.environ.get("BENCH_COMMIT") or _answer("git", "rev-parse", "HEAD"),  # a copy of the tree has no history
        "has_local_changes": bool(_answer("git", "status", "--porcelain")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }
    if device == "cuda":
        found["gpu"] = _answer("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return found


@contextmanager
def serve(options: Options, **settings: Any) -> Iterator[ReplayServer]:
    """A server of this process's own on the benchmark's device; it ends with the block."""
    with ReplayServer.spawn(device=options.device, seed=options.seed, **settings) as server:
        yield server


def transition_schema() -> Schema:
    """430 float32 a row: the shape of the single-GPU replay this project answers."""
    return Schema.of(
        obs=("float32", OBS),
        action=("float32", ACTION),
        reward="float32",
        next_obs=("float32", OBS),
        terminated="float32",
        truncated="float32",
        critic=("float32", CRITIC),
        next_critic=("float32", CRITIC),
    )


def rows_of(schema: Schema, n: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """``n`` random rows of a schema whose fields are all float32; one in 200 ends an episode."""
    generator = np.random.default_rng(seed)
    rows = {each.name: generator.standard_normal((n, *each.shape), dtype=np.float32) for each in schema}
    for role in ("terminated", "truncated"):
        if role in schema.roles:
            rows[schema.roles[role]] = (generator.random(n) < 1 / 400).astype(np.float32)
    return rows


def slots_of_a_lap(server: ReplayServer, slot_rows: int) -> int:
    """So many full slots fill the ring, headroom and all, and begin it anew. Once a collector is attached: its schema makes the ring."""
    ring_rows: int = server.status()["ring"]["ring_rows"]
    return ring_rows // slot_rows + 1


def synchronize(device: str) -> None:
    """Waits for all work of the device."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _answer(*command: str) -> str | None:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
