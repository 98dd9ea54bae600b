"""A collector process: steps its environments with the newest policy and writes every transition to the server. No torch here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from multiprocessing.connection import Connection

import gymnasium
import numpy as np
from gymnasium.wrappers.vector import RescaleAction
from plan import Plan
from policy import act, explore
from replay_server_client import Collector, Schema
from reports import Episodes, Finished


def collect(plan: Plan, ordinal: int, link: Connection, connect: Callable[..., Collector] = Collector.connect) -> None:
    """Writes ``plan.steps_per_collector`` rows, reports episodes over ``link``, then waits there to be dismissed.

    Gymnasium's default is next-step autoreset: the step after an episode's last one ignores its action and only resets, so its row is
    no transition and is masked. Each row's ``next_obs`` is therefore the true final observation where an episode ends.
    """
    seed = 1_000 * plan.seed + ordinal
    rng = np.random.default_rng(seed)
    unit = np.ones(1, np.float32)
    envs = RescaleAction(gymnasium.make_vec(plan.environment, num_envs=plan.lanes), -unit, unit)
    schema = Schema.from_spaces(envs.single_observation_space, envs.single_action_space)
    connected = connect(schema=schema, lanes=plan.lanes, name=f"collector-{ordinal}", timeout=plan.patience_s)
    with contextlib.closing(envs), connected as collector:
        obs, _ = envs.reset(seed=seed)
        only_resets = np.zeros(plan.lanes, bool)  # by the step to come
        returns = np.zeros(plan.lanes)
        rows, version, weights = 0, 0, None
        while rows < plan.steps_per_collector:
            latest = collector.latest("policy", newer_than=version)
            if latest is not None:
                version, weights = latest
            action = act(weights, obs, rng) if weights else explore((plan.lanes, *schema["action"].shape), rng)
            next_obs, reward, terminated, truncated, _ = envs.step(action)
            transition = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs}
            collector.write({**transition, "terminated": terminated, "truncated": truncated}, mask=~only_resets)
            rows += plan.lanes - int(only_resets.sum())
            returns += np.where(only_resets, 0.0, reward)
            only_resets = terminated | truncated
            if only_resets.any():
                link.send(Episodes(rows * plan.collectors, tuple(returns[only_resets].tolist())))
                returns[only_resets] = 0.0
            obs = next_obs
        collector.flush(timeout=plan.patience_s)
        link.send(Finished(rows=rows))
        link.recv()
