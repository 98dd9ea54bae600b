"""SAC from start to return: 16 CPU collectors and one trainer, through the server, and with a plain tensor ring in the trainer's process.

Both sides run the demo's own agent, collectors and learning loop, with as many updates for each row; what differs is who carries rows and
batches. The plain side: blocks of rows by a bounded multiprocessing queue, written by the trainer into one tensor a field on its device.

  time to return   from the start of all processes, and from the first update, until the mean of the last 20 episodes reaches the target
  env steps/s      those after learning starts, from the first batch until every process has done its work
  updates/s        from the first batch to the last
One seed a run, the same ones on both sides, the sides taking turns. ``--read`` runs nothing: it puts together the pairs of earlier records.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "demo_sac"))

import benchmark
from benchmark import OURS, Options, Report, serve
from collect import collect
from crew import Crew
from peers.plain_collector import PlainCollector, Wires
from plan import Plan
from record import Record
from replay_server_client import Schema

PLAIN = "plain ring"
LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Pace:
    """The trainer's batches: when the first and the last were in its hands, by the monotonic clock."""

    first_s: float
    last_s: float
    samples: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one side; None where the return was not reached."""

    seed: int
    return_s: float | None
    return_after_first_update_s: float | None
    env_steps_per_s: float
    updates_per_s: float
    first_return: float
    final_return: float
    wall_s: float
    curve: list[tuple[float, float]]  # seconds from the start, mean return of the last episodes


def main() -> None:
    options = benchmark.parse(__doc__, extend)
    if options.arguments.read:
        print_pairs(options)
        return
    report = Report("bench_train", options)
    summarize(report, run_pairs(report))
    report.publish()


def print_pairs(options: Options) -> None:
    """The table of the records given, and their plot; they are the record, so no other is left."""
    outcomes = read_pairs(options.arguments.read)
    with tempfile.TemporaryDirectory() as folder:
        report = Report("bench_train", replace(options, runs=len(outcomes[OURS]), output=Path(folder)))
        summarize(report, outcomes)
        print(report.table())
        plot = report.draw()
        if plot is not None:
            shutil.copy(plot, options.output / "bench_train_pairs.png")


def run_pairs(report: Report) -> dict[str, list[Outcome]]:
    options = report.options
    sides: dict[str, Callable[[Plan, float], Outcome]] = {OURS: partial(with_server, options), PLAIN: with_plain_ring}
    outcomes: dict[str, list[Outcome]] = {side: [] for side in sides}
    for run in range(options.runs):
        for side, train in sides.items():
            outcome = train(make_plan(options, options.seed + run), options.arguments.target_return)
            outcomes[side].append(outcome)
            print(f"{side}, seed {outcome.seed}: return {outcome.final_return:.0f} after {outcome.wall_s:.1f} s", flush=True)
            report.keep(**{side: asdict(outcome)})
    return outcomes


def read_pairs(records: Sequence[Path]) -> dict[str, list[Outcome]]:
    """The runs of seeds that both sides had in one record: of a record that was cut off the last one is left out."""
    outcomes: dict[str, list[Outcome]] = {OURS: [], PLAIN: []}
    for path in records:
        raw = json.loads(path.read_text("utf-8"))["raw"]
        runs = {side: {run["seed"]: Outcome(**run) for run in raw[side]} for side in outcomes}
        for seed in runs[OURS].keys() & runs[PLAIN].keys():
            for side, of_seed in runs.items():
                outcomes[side].append(of_seed[seed])
    return outcomes


def summarize(report: Report, outcomes: Mapping[str, list[Outcome]]) -> None:
    for group, what, unit, name in (
        ("time to return", "from the start", "s", "return_s"),
        ("time to return", "from the first update", "s", "return_after_first_update_s"),
        ("env steps a second", "env steps", "1/s", "env_steps_per_s"),
        ("updates a second", "updates", "1/s", "updates_per_s"),
    ):
        for side, runs in outcomes.items():
            figures = [figure for outcome in runs if (figure := getattr(outcome, name)) is not None]
            if figures:
                report.add(group, what, side, unit, figures)
    report.raw["runs that reached the return"] = {side: sum(run.return_s is not None for run in runs) for side, runs in outcomes.items()}
    print(f"\nreached the return: {report.raw['runs that reached the return']}, of {report.options.runs} runs each\n")


def extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--collectors", type=int, default=None, help="collector processes (default: 16, with --quick 2)")
    parser.add_argument("--steps", type=int, default=None, help="environment steps of all collectors together")
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="records whose pairs are put together; run nothing")
    parser.add_argument("--target-return", type=float, default=-300.0, help="mean return of 20 episodes to reach (default: %(default)s)")


def make_plan(options: Options, seed: int) -> Plan:
    """Two lanes a collector, an episode of each before the first update, and a ring that wraps."""
    collectors: int = options.arguments.collectors or options.pick(16, 2)
    lanes = 2
    warm_up = 200 * lanes * collectors
    steps: int = options.arguments.steps or options.pick(40_000, 6 * warm_up)
    return Plan(
        steps=steps,
        seed=seed,
        device=options.device,
        collectors=collectors,
        lanes=lanes,
        learning_starts=warm_up,
        capacity=max(warm_up, steps * 4 // 5),
        updates_per_step=0.25,
    )


def with_server(options: Options, plan: Plan, target: float) -> Outcome:
    started_s = time.monotonic()
    settings: dict[str, Any] = {
        "capacity": plan.capacity,
        "slot_rows": plan.slot_rows,
        "learning_starts": plan.learning_starts,
        "samples_per_insert": plan.samples_per_insert,
        "tolerance": plan.tolerance_rows,
    }
    with serve(options, **settings), Crew(plan, learn_from_server) as crew:
        return watch(crew, plan, target, started_s)


def with_plain_ring(plan: Plan, target: float) -> Outcome:
    wires = Wires.of(plan.collectors, policy_of(plan))
    started_s = time.monotonic()
    with ExitStack() as stack:
        stack.callback(wires.rows.close)
        crew = stack.enter_context(Crew(plan, partial(learn_from_plain_ring, wires), partial(collect_plainly, wires)))
        return watch(crew, plan, target, started_s)


def watch(crew: Crew, plan: Plan, target: float, started_s: float) -> Outcome:
    """Runs the plan to its end. Raises TimeoutError past the plan's limit."""
    record, pace, reached_s = Record(), Pace(0.0, 0.0, 0), None
    curve: list[tuple[float, float]] = []
    while not crew.has_finished:
        if time.monotonic() - started_s > plan.time_limit_s:
            raise TimeoutError(f"the run has not ended within {plan.time_limit_s:g} s")
        for report in crew.reports(LOOK_EVERY_S):
            if isinstance(report, Pace):
                pace = report
                continue
            record.add(report)
            now_s = time.monotonic()
            if record.curve:
                curve.append((now_s - started_s, record.final_return))
                if reached_s is None and record.final_return >= target and report.steps > plan.learning_starts:
                    reached_s = now_s
    ended_s = time.monotonic()
    crew.dismiss()
    return Outcome(
        seed=plan.seed,
        return_s=None if reached_s is None else reached_s - started_s,
        return_after_first_update_s=None if reached_s is None else reached_s - pace.first_s,
        env_steps_per_s=(plan.steps - plan.learning_starts) / (ended_s - pace.first_s),
        updates_per_s=(pace.samples - 1) / (pace.last_s - pace.first_s),
        first_return=record.first_return,
        final_return=record.final_return,
        wall_s=ended_s - started_s,
        curve=curve,
    )


def learn_from_server(plan: Plan, link: Connection) -> None:
    from learn import learn
    from replay_server_client import Learner

    learn(plan, link, lambda **options: Paced(Learner.connect(**options), plan, link))  # type: ignore[return-value]


def learn_from_plain_ring(wires: Wires, plan: Plan, link: Connection) -> None:
    from learn import learn
    from peers.plain_ring import Pacing, PlainRing

    pacing = Pacing(plan.learning_starts, plan.samples_per_insert, plan.tolerance_rows, plan.updates)

    def connect(*, device: str, seed: int, timeout: float) -> Any:
        return Paced(PlainRing(wires, plan.collectors, plan.capacity, pacing, device, timeout), plan, link)

    learn(plan, link, connect)


def collect_plainly(wires: Wires, plan: Plan, ordinal: int, link: Connection) -> None:
    def connect(*, schema: Schema, lanes: int, name: str, timeout: float) -> Any:
        return PlainCollector(wires, schema, plan.slot_rows)

    collect(plan, ordinal, link, connect)


class Paced:
    """A learner, or what stands in for one, that tells when its first and its last batch came."""

    def __init__(self, learner: Any, plan: Plan, link: Connection) -> None:
        self._learner = learner
        self._last_sample = plan.updates
        self._link = link
        self._first_s = 0.0
        self._samples = 0

    def sample(self, n: int, timeout: float) -> Any:
        batch = self._learner.sample(n, timeout=timeout)
        self._samples += 1
        if self._samples == 1:
            self._first_s = time.monotonic()
        if self._samples == self._last_sample:
            self._link.send(Pace(self._first_s, time.monotonic(), self._samples))
        return batch

    def post(self, mailbox: str, weights: Any) -> None:
        self._learner.post(mailbox, weights)

    def __enter__(self) -> Paced:
        self._learner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._learner.__exit__(*error)


def policy_of(plan: Plan) -> Any:
    """Weights of the shape that collectors will get."""
    import gymnasium
    import torch
    from sac import SAC

    env = gymnasium.make(plan.environment)
    (obs_size,), (action_size,) = env.observation_space.shape or (), env.action_space.shape or ()
    env.close()
    return SAC(obs_size, action_size, device=torch.device("cpu")).policy_arrays()


if __name__ == "__main__":
    main()
