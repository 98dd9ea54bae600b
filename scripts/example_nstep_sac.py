"""Soft actor-critic with n-step returns on Pendulum, through a replay server that keeps the links of each lane.

    python scripts/example_nstep_sac.py [--n-step N] [--runs N] [--seed N] [--json] [--quick]

Agent, collectors and their processes are those of scripts/demo; what differs is here: the server keeps the column ``link``, the learner
asks for ``n_step=3``, and the critics' target is ``reward + bootstrap × value(next_obs)`` with the batch's own ``bootstrap``. It is right
for every row, also where an episode ends within the n steps. As usual for n-step SAC, the entropy bonus is that of the last state alone,
and the actions in between are not corrected for being off-policy.

Exit code 0 if every run's return, the mean of the last 20 episodes, is above the target and every row is accounted for.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "demo_sac"))

import benchmark
from crew import CrewError
from plan import Plan
from record import Record, is_conserved, rows_balance
from replay_server_client import ReplayError
from reports import Finished
from train import TARGET_RETURN, end_in_order, result, train


def learn(n_step: int, plan: Plan, link: Connection) -> None:
    """The learner's process: makes ``plan.updates`` updates, then waits on ``link`` to be dismissed."""
    import gymnasium
    import torch
    from replay_server_client import Learner
    from sac import SAC, Settings

    torch.manual_seed(plan.seed)
    torch.set_num_threads(1)  # the layers are too small to share, and the collectors want a core
    settings = Settings()
    env = gymnasium.make(plan.environment)
    obs_size, action_size = math.prod(env.observation_space.shape or ()), math.prod(env.action_space.shape or ())
    agent = SAC(obs_size, action_size, device=torch.device("cpu"), settings=settings)
    with Learner.connect(device="cpu", seed=plan.seed, timeout=plan.patience_s) as learner:
        for update in range(1, plan.updates + 1):
            batch = learner.sample(plan.batch_rows, n_step=n_step, gamma=settings.gamma, timeout=plan.patience_s)
            agent.update(batch.fields, batch.bootstrap)
            if update % plan.post_every == 0:
                learner.post("policy", agent.policy_arrays())
        link.send(Finished(updates=plan.updates))
        link.recv()


def main() -> int:
    signal.signal(signal.SIGTERM, end_in_order)
    try:
        return run(parse_options())
    except KeyboardInterrupt:
        print("\ninterrupted: the server and all processes have ended", file=sys.stderr)
        return 130
    except (CrewError, ReplayError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    plan = Plan(device="cpu")
    if options.quick:
        plan = replace(plan, steps=1_200, learning_starts=600, capacity=1_000)
    records = []
    for seed in range(options.seed, options.seed + options.runs):
        record = Record()
        train(replace(plan, seed=seed), record, partial(learn, options.n_step), columns="link")
        records.append(record)
        print(
            f"n_step {options.n_step}, seed {seed}: return {record.first_return:.1f} at random, {record.final_return:.1f} at the end, "
            f"{record.env_steps:,} environment steps, {record.updates:,} updates, {record.moments[-1].time_s:.0f} s",
            flush=True,
        )
    conserved = [is_conserved(rows_balance(record.last_report)) for record in records]
    returns = [record.final_return for record in records]
    told = ", ".join(f"{value:.1f}" for value in returns)
    print(f"n_step {options.n_step}: returns {told}; the target is above {TARGET_RETURN:g}; rows {'exact' if all(conserved) else 'WRONG'}")
    if options.json:
        runs = [result(record, exact) for record, exact in zip(records, conserved, strict=True)]
        print(json.dumps({"n_step": options.n_step, "runs": runs, "machine": benchmark.machine("cpu")}), flush=True)
    return 0 if all(conserved) and (options.quick or min(returns) > TARGET_RETURN) else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-step", type=int, default=3, help="steps that a transition spans (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="runs, with one seed each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="a few seconds: shows that it runs, its return means nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
