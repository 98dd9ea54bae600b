"""The learner process: samples from the server, updates the agent, and posts its policy to the collectors' mailbox."""

from __future__ import annotations

import math
from collections.abc import Callable
from multiprocessing.connection import Connection

import gymnasium
import torch
from plan import Plan
from replay_server_client import Learner
from reports import Finished
from sac import SAC


def learn(plan: Plan, link: Connection, connect: Callable[..., Learner] = Learner.connect) -> None:
    """Makes ``plan.updates`` updates, then waits on ``link`` to be dismissed. ``sample`` waits as long as rows are behind."""
    torch.manual_seed(plan.seed)
    torch.set_num_threads(1)  # layers of 64 are too small to share, and the collectors want a core
    device = choose_device(plan.device)
    env = gymnasium.make(plan.environment)
    agent = SAC(math.prod(env.observation_space.shape or ()), math.prod(env.action_space.shape or ()), device=device)
    with connect(device=str(device), seed=plan.seed, timeout=plan.patience_s) as learner:
        for update in range(1, plan.updates + 1):
            batch = learner.sample(plan.batch_rows, timeout=plan.patience_s)
            agent.update(batch.fields)
            if update % plan.post_every == 0:
                learner.post("policy", agent.policy_arrays())
        link.send(Finished(updates=plan.updates))
        link.recv()


def choose_device(name: str) -> torch.device:
    """``auto`` is the GPU where torch sees one."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
