"""A recurrent Q-learner on a pendulum whose velocity is hidden, trained from sequences that the replay server hands out.

    python scripts/example_sequences.py [--memoryless] [--runs N] [--seed N] [--json] [--quick]

The observation is the pendulum's angle alone, so one row doesn't say which way it swings; a GRU finds that out along a sequence.
The learner is a small R2D2 (Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning", ICLR 2019): each row
keeps the recurrent state it was made with, a batch is sequences whose first rows only warm that state up (burn-in), the target is
double Q-learning's, and states that came out of the update are written back to the ring. A second head predicts the next angle, as a
world model would: it teaches the state the velocity in a few hundred updates. ``--memoryless`` starts each row from an empty state, for
comparison: the same network, and nothing to remember with.

Server, collector and learner are one script here, and take turns. Exit code 0 if every run's score is above the target (memoryless runs
have none). The score is the mean return of 20 episodes without exploration; a random policy is near -1200, a good one near -150.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import benchmark
import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from replay_server_client import Batch, Collector, Field, Learner, ReplayError, Schema
from torch import Tensor, nn

from replay_server import ReplayServer

TARGET_RETURN = -300.0
TORQUES = np.linspace(-2.0, 2.0, 5, dtype=np.float32)
REWARD_SCALE = 0.1
MOTION_SCALE = 0.1  # how far the angle's sine and cosine move in a step, about
LINE_EVERY_S = 5.0

Choice = Callable[[Tensor], NDArray[np.int64]]
"""Torques by number, ``(lanes,)``, from the values of all, ``(lanes, torques)``."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Every number of a run. A *step* is one of all lanes: ``lanes`` rows, and one update."""

    steps: int = 3_000
    warm_up_steps: int = 400  # two episodes in every lane, at random, before the first update
    lanes: int = 8
    capacity: int = 16_000  # less than the rows of a run, so that the ring wraps
    sequences: int = 32
    length: int = 20
    burn_in: int = 4
    state: int = 64
    learning_rate: float = 2e-3
    gamma: float = 0.97
    target_rate: float = 0.02  # how far the target network moves towards the other at every update
    last_exploration: float = 0.05  # share of random actions, from the first third of the run on
    max_gradient: float = 10.0


class Network(nn.Module):
    """Values of every torque, ``(…, torques)``, from angles and what the recurrent state keeps of those before."""

    def __init__(self, settings: Settings, *, has_memory: bool) -> None:
        super().__init__()
        self.has_memory = has_memory
        self.gru = nn.GRU(2, settings.state, batch_first=True)
        self.head = nn.Sequential(nn.Linear(settings.state, settings.state), nn.ReLU(), nn.Linear(settings.state, len(TORQUES)))
        self.motion = nn.Linear(settings.state, 2 * len(TORQUES))  # where each torque moves the angle to, over MOTION_SCALE

    def step(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Values and next states of rows that each have a state of their own: ``obs (n, 2)``, ``state (n, state)``."""
        after, _ = self.gru(obs[:, None], self.known(state)[None].contiguous())
        return self.head(after[:, 0]), after[:, 0]

    def along(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Values and states after each row of sequences: ``obs (n, length, 2)`` from ``state (n, state)`` on."""
        if not self.has_memory:
            values, after = self.step(obs.flatten(0, 1), torch.zeros(obs.shape[0] * obs.shape[1], state.shape[-1]))
            return values.unflatten(0, obs.shape[:2]), after.unflatten(0, obs.shape[:2])
        after, _ = self.gru(obs, state[None].contiguous())
        return self.head(after), after

    def known(self, state: Tensor) -> Tensor:
        return state if self.has_memory else torch.zeros_like(state)


class Agent:
    """The network, the one that slowly follows it, and how both learn from a batch of sequences."""

    def __init__(self, settings: Settings, *, has_memory: bool) -> None:
        self.settings = settings
        self.network = Network(settings, has_memory=has_memory)
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.network.parameters(), settings.learning_rate)

    def update(self, batch: Batch) -> Tensor:
        """One step. Returns the recurrent states before each row, ``(n, length, state)``, as the network has them now.

        ``next_obs`` of a row follows its state by one step, whatever the next row of the batch is: so the end of a sequence and the end
        of an episode need no case of their own. Where ``mask`` is False there is no row, and burn-in rows only move the state: neither
        is in ``loss_mask``.
        """
        obs, next_obs, action = batch["obs"], batch["next_obs"], batch["action"].long()
        first_state = batch["state"][:, 0]
        values, states = self.network.along(obs, first_state)
        with torch.no_grad():
            flat_next = next_obs.flatten(0, 1)
            best = self.network.step(flat_next, states.flatten(0, 1))[0].argmax(-1, keepdim=True)
            _, target_states = self.target.along(obs, first_state)
            next_values = self.target.step(flat_next, target_states.flatten(0, 1))[0].gather(-1, best).view_as(batch["reward"])
            goal = REWARD_SCALE * batch["reward"] + self.settings.gamma * ~batch["terminated"] * next_values
        errors = values.gather(-1, action[..., None]).squeeze(-1) - goal
        moved = self.network.motion(states).unflatten(-1, (len(TORQUES), 2))
        moved = moved.gather(2, action[..., None, None].expand(*action.shape, 1, 2)).squeeze(2)
        surprise = (moved - (next_obs - obs) / MOTION_SCALE).square().mean(-1)
        weights = batch.loss_mask.float()
        loss = ((nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none") + surprise) * weights).sum() / weights.sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.max_gradient)
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.network.parameters(), strict=True):
                slow.lerp_(fast, self.settings.target_rate)
        return torch.cat((first_state[:, None], states.detach()[:, :-1]), 1)


class Pendulums:
    """Lanes of Pendulum-v1 without their velocity, and the recurrent state of each. Gymnasium's next-step autoreset."""

    def __init__(self, settings: Settings, lanes: int, seed: int) -> None:
        self.lanes = lanes
        self.state = torch.zeros(lanes, settings.state)
        self.only_resets = np.zeros(lanes, bool)  # by the step to come
        self.returns = np.zeros(lanes)
        self.envs = gymnasium.make_vec("Pendulum-v1", num_envs=lanes)
        self.obs = self.envs.reset(seed=seed)[0][:, :2]

    def step(self, choose: Choice, network: Network) -> tuple[dict[str, object], NDArray[np.bool_], list[float]]:
        """One step of every lane: its rows, which of them are rows at all, and the returns of the episodes that ended."""
        with torch.no_grad():
            values, after = network.step(torch.as_tensor(self.obs), self.state)
        action = choose(values)
        seen, reward, terminated, truncated, _ = self.envs.step(TORQUES[action, None])
        next_obs = seen[:, :2]
        rows: dict[str, object] = {"obs": self.obs, "action": action.astype(np.uint8), "reward": reward.astype(np.float32)}
        rows |= {"next_obs": next_obs, "terminated": terminated, "truncated": truncated, "state": self.state.numpy()}
        is_row, ended = ~self.only_resets, terminated | truncated
        self.returns += np.where(is_row, reward, 0.0)
        finished = self.returns[ended].tolist()
        self.returns[ended] = 0.0
        self.state = torch.where(torch.as_tensor(ended | self.only_resets)[:, None], 0.0, after)
        self.obs, self.only_resets = next_obs, ended
        return rows, is_row, finished


def schema_of(settings: Settings) -> Schema:
    """``state`` is mutable: the learner writes newer ones back."""
    return Schema.of(
        obs=("float32", 2),
        action="uint8",
        reward="float32",
        next_obs=("float32", 2),
        terminated="bool",
        truncated="bool",
        state=Field("float32", settings.state, mutable=True),
    )


def train(settings: Settings, seed: int, *, has_memory: bool) -> float:
    """One run, with a server of its own; returns the score."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    agent = Agent(settings, has_memory=has_memory)
    pendulums = Pendulums(settings, settings.lanes, seed)
    returns: list[float] = []
    started_s, shown_s = time.monotonic(), time.monotonic()
    with (
        ReplayServer.spawn(capacity=settings.capacity, device="cpu", columns="link", slot_rows=8 * settings.lanes, seed=seed) as server,
        Collector.connect(server.name, schema=schema_of(settings), lanes=settings.lanes, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, device="cpu", seed=seed, run_dir=server.run_dir) as learner,
    ):
        for step in range(1, settings.steps + 1):
            explored = max(settings.last_exploration, 1.0 - 3.0 * step / settings.steps) if step > settings.warm_up_steps else 1.0

            def choose(values: Tensor, explored: float = explored) -> NDArray[np.int64]:
                at_random = rng.integers(len(TORQUES), size=settings.lanes)
                return np.where(rng.random(settings.lanes) < explored, at_random, values.argmax(-1).numpy())

            rows, is_row, finished = pendulums.step(choose, agent.network)
            collector.write(rows, mask=is_row)
            returns += finished
            if step >= settings.warm_up_steps:
                batch = learner.sequences(settings.sequences, length=settings.length, burn_in=settings.burn_in)
                states = agent.update(batch)
                learner.update(batch, {"state": states})
            if time.monotonic() - shown_s > LINE_EVERY_S or step == settings.steps:
                shown_s = time.monotonic()
                recent = returns[-2 * settings.lanes :]
                print(
                    f"{shown_s - started_s:6.1f} s  {step:>6,} steps of {settings.lanes} lanes  "
                    f"return {np.mean(recent) if recent else float('nan'):8.1f}  exploration {explored:4.0%}",
                    flush=True,
                )
    return play(settings, agent.network, seed)


def play(settings: Settings, network: Network, seed: int, episodes: int = 20) -> float:
    """The mean return of whole episodes without exploration."""
    pendulums = Pendulums(settings, episodes, 10_000 + seed)
    finished: list[float] = []
    while len(finished) < episodes:
        finished += pendulums.step(lambda values: values.argmax(-1).numpy(), network)[2]
    return float(np.mean(finished))


def main() -> int:
    try:
        return run(parse_options())
    except KeyboardInterrupt:
        print("\ninterrupted: the server has ended", file=sys.stderr)
        return 130
    except ReplayError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # the layers are too small to share, and the server wants a core
    settings = Settings(steps=300, warm_up_steps=210) if options.quick else Settings(steps=options.steps)
    kind = "memoryless" if options.memoryless else "recurrent"
    scores = []
    started_s = time.monotonic()
    for seed in range(options.seed, options.seed + options.runs):
        scores.append(train(settings, seed, has_memory=not options.memoryless))
        print(f"{kind}, seed {seed}: score {scores[-1]:.1f} after {time.monotonic() - started_s:.0f} s", flush=True)
    told = ", ".join(f"{score:.1f}" for score in scores)
    print(f"{kind}: scores {told}; mean {np.mean(scores):.1f}, the target is above {TARGET_RETURN:g}")
    if options.json:
        result = {"kind": kind, "scores": scores, "steps": settings.steps, "wall_s": round(time.monotonic() - started_s, 1)}
        print(json.dumps(result | {"machine": benchmark.machine("cpu")}), flush=True)
    return 0 if options.quick or options.memoryless or min(scores) > TARGET_RETURN else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memoryless", action="store_true", help="forget the state at every row: the baseline")
    parser.add_argument("--steps", type=int, default=Settings().steps, help="steps of all lanes (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="runs, with one seed each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="a few seconds: shows that it runs, its score means nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
