"""A double DQN on CartPole of one's own, on a server of its own: the tutorial's program. tutorial_agent.py [updates] [--seed N]"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
from typing import TYPE_CHECKING

import gymnasium
import numpy as np
from replay_server_client import Collector, Schema, ServerGone
from replay_server_client.adapters import GymnasiumWriter

from replay_server import ReplayServer

if TYPE_CHECKING:
    import torch

LANES = 4


def collect(seed: int) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=LANES)
    schema = Schema.from_spaces(envs.single_observation_space, envs.single_action_space)
    draw, version, policy = np.random.default_rng(seed), 0, None
    with Collector.connect(schema=schema, lanes=LANES, name="cartpole") as collector:
        writer = GymnasiumWriter(collector, envs)
        obs, _ = writer.reset(seed=seed)
        while True:
            if newer := collector.latest("policy", newer_than=version):
                version, policy = newer
            actions = draw.integers(0, 2, LANES)
            if policy is not None:
                x = np.maximum(obs @ policy["0.weight"].T + policy["0.bias"], 0)
                x = np.maximum(x @ policy["2.weight"].T + policy["2.bias"], 0)
                best = (x @ policy["4.weight"].T + policy["4.bias"]).argmax(1)
                explore = max(0.05, 1 - version / 50)  # share of random actions: less with every version of the policy
                actions = np.where(draw.random(LANES) < explore, actions, best)
            obs, *_ = writer.step(actions)


def collect_until_the_end(seed: int) -> None:
    with contextlib.suppress(ServerGone, KeyboardInterrupt):  # it stops in good order when the training is done
        collect(seed)


def learn(server: ReplayServer, updates: int, seed: int) -> torch.nn.Module:
    import torch  # here, not above: the collector's process imports this file too, and needs no torch
    from replay_server_client import Learner

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the network is small: more threads only take turns
    network, slow = (
        torch.nn.Sequential(torch.nn.Linear(4, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2))
        for _ in range(2)
    )
    with torch.no_grad():
        network[0].weight[:, 2] *= 8  # the pole's angle: its values are small beside the other three
    slow.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, updates)
    with Learner.connect(seed=seed, device="cpu") as learner:
        learner.wait_ready(timeout=60)
        for update in range(updates):
            if update % 100 == 0:
                learner.post("policy", {name: weights.numpy() for name, weights in network.state_dict().items()})
            if update % 1000 == 0:
                tell(server, update, updates)
            batch = learner.sample(128, n_step=5, gamma=0.99, timeout=30)
            with learner.span("update"):
                chosen = network(batch["obs"]).gather(1, batch["action"].long().unsqueeze(1)).squeeze(1)
                with torch.no_grad():
                    best = network(batch["next_obs"]).argmax(1, keepdim=True)
                    future = slow(batch["next_obs"]).gather(1, best).squeeze(1)
                    goal = batch["reward"] + batch.bootstrap * future
                loss = torch.nn.functional.smooth_l1_loss(chosen, goal)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                rate.step()
                with torch.no_grad():
                    for late, fresh in zip(slow.parameters(), network.parameters(), strict=True):
                        late.lerp_(fresh, 0.01)
    return slow


def tell(server: ReplayServer, update: int, updates: int) -> None:
    episodes = server.status()["episodes"]
    reached = f", return {episodes['last']['mean_return']:.0f} while exploring" if episodes and episodes["last"]["mean_return"] else ""
    print(f"{time.strftime('%H:%M:%S')}  update {update:,} of {updates:,}{reached}", flush=True)


def mean_return(network: torch.nn.Module, episodes: int = 20) -> float:
    import torch

    env = gymnasium.make("CartPole-v1")
    total = 0.0
    for episode in range(episodes):
        obs, _ = env.reset(seed=episode)
        ended = False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(int(network(torch.as_tensor(obs)).argmax()))
            total += float(reward)
            ended = terminated or truncated
    return total / episodes


def run(updates: int, seed: int) -> None:
    with ReplayServer.spawn(
        capacity=50_000, device="cpu", columns="link", learning_starts=1_000, samples_per_insert=32, tolerance=20_000
    ) as server:
        print(f"watch it: replay-server top --name {server.name} --run-dir {server.run_dir}", flush=True)
        collector = multiprocessing.get_context("spawn").Process(target=collect_until_the_end, args=(seed,))
        collector.start()
        network = learn(server, updates, seed)
    collector.join(10)
    print(f"mean return of 20 episodes: {mean_return(network):.0f} (a random policy: about 22, the most: 500)")


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains a double DQN on CartPole through a server of its own.")
    parser.add_argument("updates", type=int, nargs="?", default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        run(options.updates, options.seed)
    except KeyboardInterrupt:
        print("\ninterrupted: the server and the collector have ended", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
