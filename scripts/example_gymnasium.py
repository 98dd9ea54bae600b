"""Collects from Gymnasium's vector environments in one line a step, in any autoreset mode, and samples what was written.

python scripts/example_gymnasium.py [--mode next-step|same-step]
"""

from __future__ import annotations

import argparse
import sys

import gymnasium
from gymnasium.vector import AutoresetMode
from replay_server_client import Collector, Learner, Schema
from replay_server_client.adapters import GymnasiumWriter

from replay_server import ReplayServer

MODES = {"next-step": AutoresetMode.NEXT_STEP, "same-step": AutoresetMode.SAME_STEP}
LANES, STEPS, EPISODE_STEPS = 4, 102, 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="next-step", help="autoreset mode (default: %(default)s)")
    vector = {"autoreset_mode": MODES[parser.parse_args().mode]}
    envs = gymnasium.make_vec("Pendulum-v1", num_envs=LANES, max_episode_steps=EPISODE_STEPS, vector_kwargs=vector)
    schema = Schema.from_spaces(envs.single_observation_space, envs.single_action_space)
    with (
        ReplayServer.spawn(capacity=10_000, device="cpu"),
        Collector.connect(schema=schema, lanes=LANES) as collector,
        Learner.connect(device="cpu") as learner,
    ):
        writer = GymnasiumWriter(collector, envs)
        writer.reset(seed=0)
        for _ in range(STEPS):
            writer.step(envs.action_space.sample())
        rows = collector.flush()
        batch = learner.sample(256, min_committed=rows)
        ended = batch["truncated"]
        print(f"{rows} rows of {LANES * STEPS} steps; {int(ended.sum())} of {len(batch)} drawn ones end an episode")
    envs.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
