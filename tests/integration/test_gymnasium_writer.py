"""Gymnasium's own vector environments through ``GymnasiumWriter``: the rows of every autoreset mode are exactly the transitions made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replay_server_client import Collector, InvalidRequest, Learner, RowsRejected, Schema
from support.servers import ServerProcess

pytest.importorskip("gymnasium", reason="the writer is tested with the real Gymnasium: pip install gymnasium")

import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from replay_server_client.adapters import GymnasiumWriter

LANES, STEPS = 3, 23
SPACES = {
    "box": gymnasium.spaces.Box(-1e6, 1e6, (3,), np.float32),
    "dict": gymnasium.spaces.Dict({"at": gymnasium.spaces.Box(-1e6, 1e6, (3,), np.float32), "even": gymnasium.spaces.Discrete(2)}),
    "tuple": gymnasium.spaces.Tuple((gymnasium.spaces.Box(-1e6, 1e6, (3,), np.float32), gymnasium.spaces.Discrete(2))),
}
AT = {"box": "obs", "dict": "obs.at", "tuple": "obs.0"}


def length(lane: int, episode: int) -> int:
    return 1 + (lane + episode) % 4


class Numbered(gymnasium.Env[Any, Any]):
    """Observes (lane, episode, step); even episodes end by termination, odd ones by truncation."""

    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, lane: int, form: str) -> None:
        self.observation_space = SPACES[form]
        self._form, self._lane, self._episode, self._step = form, lane, -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._episode, self._step = self._episode + 1, 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        is_over = self._step == length(self._lane, self._episode)
        is_even = self._episode % 2 == 0
        return self._observed(), float(self._step), is_over and is_even, is_over and not is_even, {}

    def _observed(self) -> Any:
        at, even = np.array([self._lane, self._episode, self._step], np.float32), np.int64(self._step % 2)
        return {"box": at, "dict": {"at": at, "even": even}, "tuple": (at, even)}[self._form]


def make(mode: AutoresetMode, form: str = "box", *, copy: bool = True) -> SyncVectorEnv:
    makers: list[Callable[[], Any]] = [lambda lane=lane: Numbered(lane, form) for lane in range(LANES)]  # type: ignore[misc]
    return SyncVectorEnv(makers, copy=copy, autoreset_mode=mode)


def connect(server: ServerProcess, envs: gymnasium.vector.VectorEnv[Any, Any, Any]) -> Collector:
    schema = Schema.from_spaces(envs.single_observation_space, envs.single_action_space)
    return Collector.connect(server.name, schema=schema, lanes=LANES, run_dir=server.run_dir)


def actions(step: int) -> np.ndarray[Any, Any]:
    return np.full((LANES, 1), step / 100, np.float32)


def rows_of(server: ServerProcess, seq: int) -> dict[str, np.ndarray[Any, Any]]:
    """Every committed row, in order."""
    with Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=0) as learner:
        found: dict[int, dict[str, Any]] = {}
        for batch in learner.batches(512):
            for n, at in enumerate(batch.seqs.tolist()):
                found[at] = {name: values[n].clone().numpy() for name, values in batch.fields.items()}
            if len(found) == seq:
                break
        return {name: np.stack([found[at][name] for at in range(seq)]) for name in found[0]}


def assert_exactly_the_transitions(rows: dict[str, np.ndarray[Any, Any]], at: str, made: set[tuple[int, int, int]]) -> None:
    found = [tuple(int(part) for part in row) for row in rows[at]]
    assert len(found) == len(made)
    assert set(found) == made
    for (lane, episode, step), n in zip(found, range(len(found)), strict=True):
        ends = step + 1 == length(lane, episode)
        assert rows[f"next_{at}"][n].tolist() == [lane, episode, step + 1]
        assert rows["reward"][n] == step + 1
        assert (rows["terminated"][n], rows["truncated"][n]) == (ends and episode % 2 == 0, ends and episode % 2 == 1)


def transitions(steps: int, *, resets_take_a_step: bool) -> set[tuple[int, int, int]]:
    """Told step by step, each lane on its own."""
    made = set()
    for lane in range(LANES):
        episode, step, only_resets = 0, 0, False
        for _ in range(steps):
            if only_resets:
                episode, step, only_resets = episode + 1, 0, False
                continue
            made.add((lane, episode, step))
            step += 1
            if step == length(lane, episode):
                episode, step, only_resets = (episode, step, True) if resets_take_a_step else (episode + 1, 0, False)
    return made


@pytest.mark.parametrize("copy", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("form", SPACES)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_rows_are_the_transitions_made_and_no_others(server: ServerProcess, mode: AutoresetMode, form: str, copy: bool) -> None:
    envs = make(mode, form, copy=copy)
    with connect(server, envs) as collector:
        writer = GymnasiumWriter(collector, envs)
        writer.reset(seed=0)
        for step in range(STEPS):
            writer.step(actions(step))
        rows = rows_of(server, collector.flush())
    made = transitions(STEPS, resets_take_a_step=mode is AutoresetMode.NEXT_STEP)
    assert_exactly_the_transitions(rows, AT[form], made)


def test_without_autoreset_ended_lanes_are_reset_by_the_caller_or_refused(server: ServerProcess) -> None:
    envs = make(AutoresetMode.DISABLED)
    with connect(server, envs) as collector:
        writer = GymnasiumWriter(collector, envs)
        with pytest.raises(InvalidRequest, match="reset"):
            writer.step(actions(0))
        writer.reset(seed=0)
        refused = 0
        for step in range(STEPS):
            _, _, terminated, truncated, _ = writer.step(actions(step))
            ended = terminated | truncated
            if ended.any():
                with pytest.raises(InvalidRequest, match=f"lanes \\[{np.flatnonzero(ended)[0]}"):
                    writer.step(actions(step))
                refused += 1
                writer.reset(options={"reset_mask": ended})
        assert refused
        rows = rows_of(server, collector.flush())
    assert_exactly_the_transitions(rows, "obs", transitions(STEPS, resets_take_a_step=False))


class Keeping(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    """Keeps the final observations of earlier steps in ``info``, as if they were of this one (fault D03)."""

    _kept: dict[str, Any]

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *stepped, info = self.env.step(actions)
        last = getattr(self, "_last", np.full(LANES, None, object))
        for lane in np.flatnonzero(info.get("_final_obs", np.zeros(LANES, bool))):
            last[lane] = info["final_obs"][lane]
        self._last = last
        return *stepped, {**info, "final_obs": last.copy(), "_final_obs": np.ones(LANES, bool)}


def test_final_observations_of_an_earlier_step_are_never_read(server: ServerProcess) -> None:
    envs = Keeping(make(AutoresetMode.SAME_STEP))
    with connect(server, envs) as collector:
        writer = GymnasiumWriter(collector, envs)
        writer.reset()
        for step in range(STEPS):
            writer.step(actions(step))
        rows = rows_of(server, collector.flush())
    assert_exactly_the_transitions(rows, "obs", transitions(STEPS, resets_take_a_step=False))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_chains_never_lead_from_one_episode_into_another_also_when_reset_breaks_one_off(
    start_server: Callable[..., ServerProcess], mode: AutoresetMode
) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "16", "--columns", "link")
    envs = make(mode)
    with (
        connect(server, envs) as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=0) as learner,
    ):
        writer = GymnasiumWriter(collector, envs)
        for part in range(4):
            writer.reset()
            for step in range(2 + part):
                _, _, terminated, truncated, _ = writer.step(actions(step))
                ended = terminated | truncated
                if mode is AutoresetMode.DISABLED and ended.any():
                    writer.reset(options={"reset_mask": ended})
        batch = learner.sample(512, n_step=4, gamma=1.0, min_committed=collector.flush())
        obs, next_obs, steps = batch["obs"], batch["next_obs"], batch.n_steps
        assert (next_obs[:, :2] == obs[:, :2]).all()  # lane and episode
        assert (next_obs[:, 2] - obs[:, 2] == steps).all()
        assert steps.max() > 1


class Losing(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    """Tells no final observations in its first step."""

    has_lost = False

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *stepped, info = self.env.step(actions)
        lost, self.has_lost = not self.has_lost, True
        return *stepped, {} if lost else info


def test_a_step_without_its_final_observations_is_refused_whole_and_the_next_one_is_right_again(server: ServerProcess) -> None:
    envs = Losing(make(AutoresetMode.SAME_STEP))
    with connect(server, envs) as collector:
        writer = GymnasiumWriter(collector, envs)
        writer.reset()
        with pytest.raises(RowsRejected, match=r"lanes \[0\] ended .*final_obs"):
            writer.step(actions(0))  # lane 0's first episode has one step
        for step in range(1, STEPS):
            writer.step(actions(step))
        rows = rows_of(server, collector.flush())
    made = transitions(STEPS, resets_take_a_step=False) - {(lane, 0, 0) for lane in range(LANES)}
    assert_exactly_the_transitions(rows, "obs", made)


def test_what_does_not_fit_is_refused_by_name(server: ServerProcess) -> None:
    envs = make(AutoresetMode.NEXT_STEP)
    schema = Schema.from_spaces(envs.single_observation_space, envs.single_action_space)
    with Collector.connect(server.name, schema=schema, lanes=LANES + 1, run_dir=server.run_dir) as collector:
        with pytest.raises(InvalidRequest, match=f"{LANES} environments.*lanes={LANES + 1}"):
            GymnasiumWriter(collector, envs)
        for mode in ("Sometimes", 3):
            with pytest.raises(InvalidRequest, match="autoreset_mode"):
                GymnasiumWriter(collector, envs, autoreset_mode=mode)
