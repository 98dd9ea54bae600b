"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905) in one file that knows nothing of where its batches come from.

Twin critics with a slowly following target, a tanh-Gaussian actor, and an entropy temperature that tunes itself. Actions lie in [-1, 1].
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

LOG_STD_RANGE = (-5.0, 2.0)


@dataclass(frozen=True, slots=True)
class Settings:
    """Few steps and small networks: Pendulum is solved in seconds with these; larger tasks want wider layers and smaller rates."""

    hidden: int = 64
    learning_rate: float = 2e-3
    gamma: float = 0.98
    target_rate: float = 0.01  # how far the target critics move towards the critics at every update


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class Actor(nn.Module):
    """A Gaussian squashed by tanh: ``actor(obs)`` gives ``actions (n, action)`` in [-1, 1] and ``log_probs (n,)``."""

    def __init__(self, obs_size: int, action_size: int, hidden: int) -> None:
        super().__init__()
        self.layers = mlp(obs_size, hidden, 2 * action_size)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.layers(obs).chunk(2, dim=-1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        squash = 2 * (math.log(2) - raw - F.softplus(-2 * raw))  # log(1 - tanh(raw)²), stable for large raw
        return raw.tanh(), (gaussian - squash).sum(-1)


class TwinCritic(nn.Module):
    """Two independent critics: ``critic(obs, action)`` gives their values, ``(2, n)``."""

    def __init__(self, obs_size: int, action_size: int, hidden: int) -> None:
        super().__init__()
        self.twins = nn.ModuleList(mlp(obs_size + action_size, hidden, 1) for _ in range(2))

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        both = torch.cat((obs, action), dim=-1)
        return torch.stack([twin(both).squeeze(-1) for twin in self.twins])


class SAC:
    """The agent. ``update`` takes one batch; ``policy_arrays`` is what a collector needs to act."""

    def __init__(self, obs_size: int, action_size: int, *, device: torch.device, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        hidden, rate = self.settings.hidden, self.settings.learning_rate
        self.actor = Actor(obs_size, action_size, hidden).to(device)
        self.critic = TwinCritic(obs_size, action_size, hidden).to(device)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = torch.zeros((), device=device, requires_grad=True)
        self.target_entropy = -float(action_size)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), rate)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), rate)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], rate)

    def update(self, batch: Mapping[str, Tensor], bootstrap: Tensor | None = None) -> None:
        """One step of critics, actor, temperature and target from ``obs action reward next_obs terminated``, each ``(n, ...)``.

        ``bootstrap (n,)`` is the factor of the value of ``next_obs``: of n-step batches ``Batch.bootstrap``, without it gamma. Only
        ``terminated`` ends it: an episode cut by a time limit had a future, and its ``next_obs`` is the true one.
        """
        obs, action = batch["obs"], batch["action"]
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            next_action, next_log_prob = self.actor(batch["next_obs"])
            next_value = self.target(batch["next_obs"], next_action).amin(0) - alpha * next_log_prob
            factor = self.settings.gamma * ~batch["terminated"] if bootstrap is None else bootstrap
            goal = batch["reward"] + factor * next_value
        critic_loss = (self.critic(obs, action) - goal).square().mean(-1).sum()
        step(self.critic_optimizer, critic_loss)

        self.critic.requires_grad_(False)
        new_action, log_prob = self.actor(obs)
        actor_loss = (alpha * log_prob - self.critic(obs, new_action).amin(0)).mean()
        step(self.actor_optimizer, actor_loss)
        self.critic.requires_grad_(True)

        alpha_loss = -self.log_alpha.exp() * (log_prob.detach().mean() + self.target_entropy)
        step(self.alpha_optimizer, alpha_loss)
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                slow.lerp_(fast, self.settings.target_rate)

    def policy_arrays(self) -> dict[str, NDArray[np.float32]]:
        """The actor's weights and biases by name, in the order in which they are applied."""
        return {name: value.cpu().numpy() for name, value in self.actor.layers.state_dict().items()}


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
