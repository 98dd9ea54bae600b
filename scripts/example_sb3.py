"""Trains Stable-Baselines3's SAC on Pendulum with its replay in a server; needs the extra `sb3`.

    python scripts/example_sb3.py [--steps N] [--seed N]

Prints SB3's own evaluation before and after, and the server's counters; a random policy's mean return is near -1200.
"""

from __future__ import annotations

import argparse
import sys

from replay_server_client.adapters import ServerReplayBuffer
from stable_baselines3 import SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from replay_server import ReplayServer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5_000, help="environment steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of environments, networks and draws (default: %(default)s)")
    options = parser.parse_args()
    with ReplayServer.spawn(capacity=100_000, device="auto") as server:
        envs = make_vec_env("Pendulum-v1", n_envs=1, seed=options.seed)
        replay = {"replay_buffer_class": ServerReplayBuffer, "replay_buffer_kwargs": {"seed": options.seed}}
        model = SAC("MlpPolicy", envs, learning_rate=1e-3, seed=options.seed, **replay)
        before, _ = evaluate_policy(model, envs, n_eval_episodes=10)
        model.learn(options.steps)
        after, _ = evaluate_policy(model, envs, n_eval_episodes=10)
        counters = server.status()["counters"]
        model.replay_buffer.close()
        print(f"mean return {before:.0f} before, {after:.0f} after {options.steps:,} steps; {counters}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
