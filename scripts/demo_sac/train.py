"""Trains soft actor-critic on Pendulum through a replay server: two collector processes, one learner process, one sidecar.

Exit code 0 when the mean return of the last 20 episodes is above the target and every row is accounted for, 1 otherwise,
130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from crew import Crew, CrewError, Target
from plan import Plan
from record import Record, is_conserved, rows_balance
from replay_server_client import ReplayError

from replay_server import ReplayServer

TARGET_RETURN = -300.0
LOOK_EVERY_S = 0.5
LINE_EVERY_S = 5.0  # where there is no terminal to rewrite one line on
OUTPUT = Path(__file__).resolve().parents[2] / "build" / "demo"
PICTURE = "training.png"


def main() -> int:
    options = parse_options()
    plan = Plan(steps=options.steps, seed=options.seed, device=options.device)
    signal.signal(signal.SIGTERM, end_in_order)
    record = Record()
    try:
        train(plan, record)
    except KeyboardInterrupt:
        print("\ninterrupted: the server and all processes have ended", file=sys.stderr)
        return 130
    except (CrewError, ReplayError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return conclude(plan, record, options.output, options.json)


def train(plan: Plan, record: Record, learner: Target | None = None, *, columns: str | None = None) -> None:
    """Runs the plan to its end or its time limit, and fills ``record`` on the way.

    ``learner`` is what the learner's process runs instead of the demo's own, ``columns`` are side columns that it needs.
    """
    started = time.monotonic()
    server = ReplayServer.spawn(
        capacity=plan.capacity,
        device=plan.device,
        slot_rows=plan.slot_rows,
        learning_starts=plan.learning_starts,
        samples_per_insert=plan.samples_per_insert,
        tolerance=plan.tolerance_rows,
        seed=plan.seed,
        columns=columns,
    )
    line = ProgressLine()
    with server, Crew(plan, learner) as crew:
        while not crew.has_finished and time.monotonic() - started < plan.time_limit_s:
            for episodes in crew.reports(timeout_s=LOOK_EVERY_S):
                record.add(episodes)
            record.look(server.status(), time.monotonic() - started)
            line.show(record.progress())
        in_time = crew.has_finished
        record.finish(crew.finished, is_whole=in_time)
        crew.dismiss()
    line.end()
    if not in_time:
        print(f"stopped at the time limit of {plan.time_limit_s:g} s", file=sys.stderr)


def conclude(plan: Plan, record: Record, output: Path, as_json: bool) -> int:
    """Draws the picture, prints the summary and judges the run."""
    from picture import draw  # matplotlib takes a second to import: not before the work starts

    balance = rows_balance(record.last_report)
    conserved = is_conserved(balance) and record.rows_written in (None, balance["published"])
    reached = record.final_return > TARGET_RETURN
    output.mkdir(parents=True, exist_ok=True)
    work = f"{record.env_steps:,} environment steps, {record.updates:,} updates of {plan.batch_rows} rows"
    draw(record, f"SAC on {plan.environment} through replay-server, seed {plan.seed}: {work}", TARGET_RETURN, output / PICTURE)
    places = ", ".join(f"{rows:,} {place}" for place, rows in balance.items())
    print(f"return   {record.first_return:.1f} at random, {record.final_return:.1f} at the end; the target is above {TARGET_RETURN:g}")
    print(f"work     {work}, {record.moments[-1].time_s:.1f} s")
    print(f"rows     {places}: {'exact' if conserved else 'THE SUM IS WRONG'}")
    print(f"picture  {output / PICTURE}")
    if as_json:
        print(json.dumps(result(record, conserved)), flush=True)
    if not reached:
        print(f"the return missed the target: {record.final_return:.1f} is not above {TARGET_RETURN:g}", file=sys.stderr)
    return 0 if reached and conserved else 1


def result(record: Record, conserved: bool) -> dict[str, float | int | bool | None]:
    return {
        "first_return": number(record.first_return),
        "final_return": number(record.final_return),
        "env_steps": record.env_steps,
        "updates": record.updates,
        "rows_committed": record.last_report["counters"]["rows_committed"],
        "conservation_ok": conserved,
        "wall_s": number(record.moments[-1].time_s),
    }


def number(value: float) -> float | None:
    """JSON has no NaN."""
    return round(value, 2) if math.isfinite(value) else None


class ProgressLine:
    """One line rewritten in place on a terminal, a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._shown_at = -math.inf

    def show(self, text: str) -> None:
        now = time.monotonic()
        if self._is_terminal:
            print(f"\r{text}\x1b[K", end="", flush=True)
        elif now - self._shown_at >= LINE_EVERY_S:
            self._shown_at = now
            print(text, flush=True)

    def end(self) -> None:
        if self._is_terminal:
            print()


def end_in_order(*_: object) -> NoReturn:
    """SIGTERM unwinds like Ctrl-C, so that no process outlives this one."""
    raise KeyboardInterrupt


def parse_options() -> argparse.Namespace:
    defaults = Plan()
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, help="environment steps of all collectors together (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of environments, networks and draws (default %(default)s)")
    parser.add_argument(
        "--device", default=defaults.device, help="auto, cpu or cuda[:N], for the ring and the learner (default %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="DIR", help="where the picture goes (default: build/demo of the checkout)"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    least = defaults.learning_starts + defaults.collectors * defaults.lanes
    if options.steps < least:
        parser.error(f"--steps {options.steps}: at least {least}, learning starts after {defaults.learning_starts}")
    return options


if __name__ == "__main__":
    sys.exit(main())
