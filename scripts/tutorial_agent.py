"""A double DQN on CartPole of one's own, on a server of its own: the tutorial's program. python scripts/tutorial_agent.py [updates]"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys

import gymnasium
import numpy as np
import torch
from replay_server_client import Collector, Learner, Schema, ServerGone
from replay_server_client.adapters import GymnasiumWriter

from replay_server import ReplayServer

LANES = 4


# --8<-- [start:collect]
def collect() -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=LANES)
    schema = Schema.from_spaces(envs.single_observation_space, envs.single_action_space)
    draw, version, policy = np.random.default_rng(0), 0, None
    with Collector.connect(schema=schema, lanes=LANES, name="cartpole") as collector:
        writer = GymnasiumWriter(collector, envs)
        obs, _ = writer.reset(seed=0)
        while True:
            if newer := collector.latest("policy", newer_than=version):
                version, policy = newer
            actions = envs.action_space.sample()
            if policy is not None:
                hidden = np.maximum(obs @ policy["0.weight"].T + policy["0.bias"], 0)
                best = (hidden @ policy["2.weight"].T + policy["2.bias"]).argmax(1)
                actions = np.where(draw.random(LANES) < 0.1, actions, best)
            obs, *_ = writer.step(actions)
            # --8<-- [end:collect]


def collect_until_the_end() -> None:
    with contextlib.suppress(ServerGone, KeyboardInterrupt):  # it stops in good order when the training is done
        collect()


# --8<-- [start:learn]
def learn(updates: int) -> torch.nn.Module:
    network, target = (torch.nn.Sequential(torch.nn.Linear(4, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2)) for _ in range(2))
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), 5e-4)
    with Learner.connect(seed=1) as learner:
        learner.wait_ready(timeout=60)
        for update in range(updates):
            if update % 100 == 0:
                learner.post("policy", {name: weights.numpy() for name, weights in network.state_dict().items()})
            batch = learner.sample(128, timeout=30)
            chosen = network(batch["obs"]).gather(1, batch["action"].long().unsqueeze(1)).squeeze(1)
            with torch.no_grad():
                best = network(batch["next_obs"]).argmax(1, keepdim=True)
                future = target(batch["next_obs"]).gather(1, best).squeeze(1)
                goal = batch["reward"] + 0.99 * future * ~batch["terminated"]
            loss = torch.nn.functional.smooth_l1_loss(chosen, goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
                    slow.lerp_(fast, 0.005)
    return network
    # --8<-- [end:learn]


def mean_return(network: torch.nn.Module, episodes: int = 10) -> float:
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


# --8<-- [start:run]
def main() -> int:
    updates = int(sys.argv[1]) if len(sys.argv) > 1 else 15_000
    with ReplayServer.spawn(capacity=50_000, device="cpu", learning_starts=1_000, samples_per_insert=32, tolerance=20_000) as server:
        print(f"watch it: replay-server top --name {server.name} --run-dir {server.run_dir}", flush=True)
        collector = multiprocessing.get_context("spawn").Process(target=collect_until_the_end)
        collector.start()
        network = learn(updates)
    collector.join(10)
    print(f"mean return of 10 episodes: {mean_return(network):.0f} (a random policy: about 22, the most: 500)")
    return 0
    # --8<-- [end:run]


if __name__ == "__main__":
    sys.exit(main())
