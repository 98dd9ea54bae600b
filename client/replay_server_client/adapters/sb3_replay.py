"""Stable-Baselines3 with its replay in a server: ``SAC("MlpPolicy", env, replay_buffer_class=ServerReplayBuffer)``."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium import spaces
from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.schema import Field, Schema
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from replay_server_client.batch import Batch
from replay_server_client.collector import Collector
from replay_server_client.learner import Learner


class ServerReplayBuffer(ReplayBuffer):
    """A collector and a learner of one server behind the face of SB3's ReplayBuffer; for SAC, TD3, DDPG and DQN.

    The server's ``--capacity`` counts, not ``buffer_size``. ``replay_buffer_kwargs`` may give ``server`` and ``run_dir`` (default: as
    ``connect`` finds them), ``seed`` of the draws, ``timeout`` of every wait in seconds, and ``fresh``. With it (the default) each batch is
    drawn from all rows added so far, as SB3's own are; without, batches are made ready ahead and lag by up to a slot's rows. Time limits
    are kept apart from terminations, as ``handle_timeout_termination`` says. A batch's tensors are views that hold until the next
    ``sample``. ``close()`` ends both sessions. SB3's ``n_steps`` and HER are not supported; rows live in the server, so the buffer can't be
    pickled. Raises what ``connect``, ``write`` and ``sample`` raise.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        server: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        seed: int = 0,
        timeout: float = 30.0,
        fresh: bool = True,
    ) -> None:
        if optimize_memory_usage:
            raise InvalidRequest("optimize_memory_usage=True: a row carries its own next observation here; leave the option out")
        BaseBuffer.__init__(
            self, buffer_size, observation_space, action_space, device, n_envs=n_envs
        )  # ReplayBuffer's own takes the memory
        self.handle_timeout_termination = handle_timeout_termination
        self.optimize_memory_usage = False
        self._fresh, self._wait_s = fresh, timeout
        self._unflushed, self._seq = False, 0
        schema = _schema(self.obs_shape, observation_space, self.action_dim, self._maybe_cast_dtype(action_space.dtype))
        lanes, name = n_envs, f"sb3-{os.getpid()}"
        self.collector = Collector.connect(server, schema=schema, lanes=lanes, name=name, run_dir=run_dir, timeout=timeout)
        try:
            where, prefetch = str(self.device), 0 if fresh else 1
            self.learner = Learner.connect(
                server, schema=schema, device=where, seed=seed, prefetch=prefetch, run_dir=run_dir, timeout=timeout
            )
        except BaseException:
            self.collector.close()
            raise

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: list[dict[str, Any]]) -> None:
        """Writes one step of all environments; SB3 has put final observations in their places."""
        done = np.asarray(done, np.bool_)
        timeouts = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos], np.bool_) & self.handle_timeout_termination
        self.collector.write(
            {
                "obs": self._as_rows(obs),
                "action": np.asarray(action, self._maybe_cast_dtype(self.action_space.dtype)).reshape(self.n_envs, self.action_dim),
                "reward": np.asarray(reward, np.float32),
                "next_obs": self._as_rows(next_obs),
                "terminated": done & ~timeouts,
                "truncated": done & timeouts,
            },
            timeout=self._wait_s,
        )
        self._unflushed = True

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples | DictReplayBufferSamples:
        """The next batch, drawn with replacement; ``env`` normalises it as it would SB3's own."""
        if self._fresh and self._unflushed:
            self._seq, self._unflushed = self.collector.flush(self._wait_s), False
        batch = self.learner.sample(batch_size, min_committed=self._seq, timeout=self._wait_s)
        reward = batch["reward"].unsqueeze(-1)
        if env is not None:
            reward = torch.as_tensor(self._normalize_reward(reward.cpu().numpy(), env), device=self.device)
        obs, next_obs = self._observations(batch, "obs", env), self._observations(batch, "next_obs", env)
        samples = DictReplayBufferSamples if isinstance(self.obs_shape, dict) else ReplayBufferSamples
        return samples(obs, batch["action"], next_obs, batch["terminated"].unsqueeze(-1).float(), reward)

    def size(self) -> int:
        """Rows that this buffer has written and the server can still have."""
        written = self.collector.statistics().rows_written
        return min(written, self.learner.capacity or 0)

    def close(self) -> None:
        """Ends both sessions; the rows stay in the server. Safe to call twice."""
        self.learner.close()
        self.collector.close()

    def reset(self) -> NoReturn:
        raise InvalidRequest("the rows live in the server, which only forgets the oldest: start another server to begin anew")

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("the rows live in the server and can't be pickled; model.save() leaves the replay buffer out")

    def _as_rows(self, obs: Any) -> Any:
        """Observations as the schema has them: with a dimension for SB3's discrete ones."""
        if isinstance(self.obs_shape, dict):
            spaces_of = self.observation_space.spaces
            return {key: np.asarray(obs[key], spaces_of[key].dtype).reshape(self.n_envs, *shape) for key, shape in self.obs_shape.items()}
        return np.asarray(obs, self.observation_space.dtype).reshape(self.n_envs, *self.obs_shape)

    def _observations(self, batch: Batch, name: str, env: VecNormalize | None) -> Any:
        found: Any = {key: batch[f"{name}.{key}"] for key in self.obs_shape} if isinstance(self.obs_shape, dict) else batch[name]
        if env is None:
            return found
        hosted = {key: part.cpu().numpy() for key, part in found.items()} if isinstance(found, dict) else found.cpu().numpy()
        normal = self._normalize_obs(hosted, env)
        if isinstance(normal, dict):
            return {key: torch.as_tensor(part, device=self.device) for key, part in normal.items()}
        return torch.as_tensor(normal, device=self.device)


def _schema(obs_shape: Any, space: Any, action_dim: int, action_dtype: Any) -> Schema:
    obs: object
    if isinstance(obs_shape, dict):
        obs = {key: Field(np.dtype(space.spaces[key].dtype).name, shape) for key, shape in obs_shape.items()}
    else:
        obs = Field(np.dtype(space.dtype).name, obs_shape)
    action = Field(np.dtype(action_dtype).name, action_dim)
    ends = {"terminated": "bool", "truncated": "bool"}
    return Schema.of({"obs": obs, "action": action, "reward": "float32", "next_obs": obs, **ends})
