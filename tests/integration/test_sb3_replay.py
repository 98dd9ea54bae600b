"""The real Stable-Baselines3 with its replay in a real server."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from replay_server_client import InvalidRequest
from support.rarely import rarely
from support.reports import assert_conserved, wait_report
from support.servers import ServerProcess

pytest.importorskip("stable_baselines3", reason="needs the real Stable-Baselines3: pip install 'replay-server[sb3]'")

import torch
from gymnasium import spaces
from replay_server_client.adapters import ServerReplayBuffer
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]  # the library's own warnings are its business

BOX, ACTION = spaces.Box(-1e6, 1e6, (3,), np.float32), spaces.Box(-1.0, 1.0, (2,), np.float32)


def reach(server: ServerProcess) -> dict[str, Any]:
    return {"server": server.name, "run_dir": server.run_dir}


def steps(n: int, lanes: int, seed: int = 0) -> list[tuple[Any, ...]]:
    """Arguments of ``add``; the first element of an observation is the row's number."""
    rng = np.random.default_rng(seed)
    made: list[tuple[Any, ...]] = []
    for step in range(n):
        obs = np.column_stack([step * lanes + np.arange(lanes), rng.normal(size=(lanes, 2))]).astype(np.float32)
        done = rng.random(lanes) < 0.3
        infos = [{"TimeLimit.truncated": bool(done[lane] and rng.random() < 0.5)} for lane in range(lanes)]
        action = rng.uniform(-1, 1, (lanes, 2)).astype(np.float32)
        made.append((obs, obs + 0.5, action, rng.normal(size=lanes), done, infos))
    return made


def rows_seen(replay: ReplayBuffer, batches: int) -> dict[int, tuple[list[float], ...]]:
    found = {}
    for _ in range(batches):
        samples = replay.sample(64)
        for row in zip(*(part.reshape(64, -1) for part in samples[:5]), strict=True):
            found[int(row[0][0])] = tuple(part.tolist() for part in row)
    return found


@pytest.mark.parametrize("handles", [True, *rarely(False)])
def test_its_samples_are_those_of_sb3s_own_buffer_field_by_field(server: ServerProcess, handles: bool) -> None:
    own = ReplayBuffer(1000, BOX, ACTION, "cpu", n_envs=4, handle_timeout_termination=handles)
    theirs = ServerReplayBuffer(1000, BOX, ACTION, "cpu", n_envs=4, handle_timeout_termination=handles, **reach(server))
    for step in steps(20, 4):
        own.add(*step)
        theirs.add(*step)
    assert rows_seen(theirs, 30) == rows_seen(own, 30)
    sample, expected = theirs.sample(64), own.sample(64)
    for name in ("observations", "actions", "next_observations", "dones", "rewards"):
        assert getattr(sample, name).shape == getattr(expected, name).shape
        assert getattr(sample, name).dtype == getattr(expected, name).dtype
    assert theirs.size() == own.size() * 4 == 80
    theirs.close()
    theirs.close()


def test_every_batch_can_hold_the_row_added_last(server: ServerProcess) -> None:
    replay = ServerReplayBuffer(1000, BOX, ACTION, "cpu", **reach(server))
    for n, step in enumerate(steps(10, 1)):
        replay.add(*step)
        assert n in {int(row[0]) for row in replay.sample(64).observations}  # missed with chance (9/10)**64
    replay.close()


def test_dict_and_discrete_observations_have_the_shapes_of_sb3s_own(start_server: Callable[..., ServerProcess]) -> None:
    space = spaces.Dict({"at": BOX, "kind": spaces.Discrete(5)})
    replay = ServerReplayBuffer(100, space, spaces.Discrete(3), "cpu", n_envs=2, **reach(start_server("--capacity", "100")))
    obs = {"at": np.ones((2, 3), np.float32), "kind": np.array([[1], [4]])}
    replay.add(obs, obs, np.array([0, 2]), np.zeros(2), np.zeros(2), [{}, {}])
    samples: Any = replay.sample(16)
    assert {key: tuple(part.shape) for key, part in samples.observations.items()} == {"at": (16, 3), "kind": (16, 1)}
    assert (tuple(samples.actions.shape), samples.actions.dtype) == ((16, 1), torch.int64)
    replay.close()


def test_a_vec_normalize_normalises_what_is_sampled(server: ServerProcess) -> None:
    envs = VecNormalize(make_vec_env("Pendulum-v1", n_envs=2), clip_obs=5.0)
    envs.obs_rms.mean[:], envs.obs_rms.var[:] = 1.0, 4.0
    replay = ServerReplayBuffer(1000, envs.observation_space, envs.action_space, "cpu", n_envs=2, **reach(server))
    obs = np.full((2, 3), 3.0, np.float32)
    replay.add(obs, obs, np.zeros((2, 1), np.float32), np.full(2, 4.0), np.zeros(2), [{}, {}])
    samples = replay.sample(8, env=envs)
    assert samples.observations == pytest.approx(np.ones((8, 3)), abs=1e-3)
    assert samples.rewards == pytest.approx(np.full((8, 1), envs.normalize_reward(np.array(4.0))))
    replay.close()


def test_what_it_cannot_do_is_refused_by_name(server: ServerProcess) -> None:
    with pytest.raises(InvalidRequest, match="optimize_memory_usage"):
        ServerReplayBuffer(1000, BOX, ACTION, "cpu", optimize_memory_usage=True, **reach(server))
    unknown: dict[str, Any] = {"n_steps": 3}
    with pytest.raises(TypeError, match="n_steps"):
        ServerReplayBuffer(1000, BOX, ACTION, "cpu", **unknown)
    replay = ServerReplayBuffer(1000, BOX, ACTION, "cpu", **reach(server))
    refusals: tuple[Any, ...] = (lambda: pickle.dumps(replay), replay.reset)
    for refused in refusals:
        with pytest.raises(InvalidRequest, match="live in the server"):
            refused()
    replay.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Networks this small only lose time by a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("algorithm", "environment"), [(SAC, "Pendulum-v1"), pytest.param(DQN, "CartPole-v1", marks=pytest.mark.slow)])
def test_sb3s_algorithms_train_through_the_server(server: ServerProcess, one_thread: None, algorithm: Any, environment: str) -> None:
    replay = {"replay_buffer_class": ServerReplayBuffer, "replay_buffer_kwargs": reach(server)}
    envs = make_vec_env(environment, n_envs=2, seed=1)
    sizes = {"policy_kwargs": {"net_arch": [16]}, "batch_size": 32}
    model = algorithm("MlpPolicy", envs, learning_starts=50, train_freq=4, seed=1, device="cpu", **sizes, **replay)
    before = [parameter.clone() for parameter in model.policy.parameters()]
    model.learn(100)
    assert any((now != was).any() for now, was in zip(model.policy.parameters(), before, strict=True))
    report = wait_report(server, lambda found: found["counters"]["rows_in_flight"] == 0)
    assert_conserved(report)
    assert report["counters"]["rows_committed"] == model.replay_buffer.size() == model.num_timesteps
    assert report["learners"][0]["batches"] > 0
    model.replay_buffer.close()
