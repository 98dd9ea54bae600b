"""Trains a value function by tensordict's modules on batches of the server, none of them copied for it.

python scripts/example_tensordict.py
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from replay_server_client import Collector, Learner, Schema
from replay_server_client.adapters import to_tensordict
from tensordict.nn import TensorDictModule
from torch import nn

from replay_server import ReplayServer

SCHEMA = Schema.of(obs=("float32", 3), reward="float32", next_obs=("float32", 3), terminated="bool", truncated="bool")
ROWS, BATCH_ROWS, UPDATES, GAMMA = 4_000, 256, 200, 0.9


def main() -> int:
    torch.manual_seed(0)
    with (
        ReplayServer.spawn(capacity=10_000, device="cpu"),
        Collector.connect(schema=SCHEMA) as collector,
        Learner.connect(device="cpu", seed=0) as learner,
    ):
        collector.write(walk(ROWS))
        rows = collector.flush()
        layers = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
        value = TensorDictModule(layers, in_keys=["obs"], out_keys=["value"])
        next_value = TensorDictModule(layers, in_keys=[("next", "obs")], out_keys=[("next", "value")])
        optimizer = torch.optim.Adam(value.parameters(), 3e-3)
        for update in range(UPDATES):
            data = to_tensordict(learner.sample(BATCH_ROWS, min_committed=rows), torchrl=True)
            with torch.no_grad():
                next_value(data)
                goal = data["next", "reward"] + GAMMA * ~data["next", "terminated"] * data["next", "value"]
            loss = (value(data)["value"] - goal).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if update in (0, UPDATES - 1):
                print(f"update {update + 1}: TD error {loss.item():.4f}")
    return 0


def walk(n: int) -> dict[str, np.ndarray]:
    """Steps of a point that drifts to the origin; the reward is minus its distance."""
    random = np.random.default_rng(0)
    obs = random.standard_normal((n, 3)).astype(np.float32)
    next_obs = (0.8 * obs + 0.05 * random.standard_normal((n, 3))).astype(np.float32)
    no = np.zeros(n, bool)
    return {"obs": obs, "reward": -np.linalg.norm(next_obs, axis=1), "next_obs": next_obs, "terminated": no, "truncated": no}


if __name__ == "__main__":
    sys.exit(main())
