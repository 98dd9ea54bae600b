"""Steps Gymnasium's vector environments and writes every transition, right in each of their autoreset modes.

```
            obs  ──step──►  next_obs, terminated | truncated = ended       what the row of that step holds
NEXT_STEP   the step after an ended one only resets                        no row: it is masked
SAME_STEP   next_obs of an ended lane is the next episode's first          next_obs is info["final_obs"] there
DISABLED    an ended lane must be reset by the caller                      the row; stepping on without a reset is refused
```
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from replay_server_protocol.errors import InvalidRequest, ReplayError, RowsRejected, shown

from replay_server_client.collector import Collector

MODES = ("NextStep", "SameStep", "Disabled")
"""The values of Gymnasium's AutoresetMode."""

Bools = npt.NDArray[np.bool_]


class VectorEnvironments(Protocol):
    """What is used of ``gymnasium.vector.VectorEnv``."""

    metadata: dict[str, Any]

    @property
    def num_envs(self) -> int: ...

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, actions: Any, /) -> tuple[Any, Any, Any, Any, dict[str, Any]]: ...


class GymnasiumWriter:
    """``reset`` and ``step`` in place of the environments' own; each step's transitions are written to ``collector``.

    The collector's schema has obs, action, reward, next_obs, terminated and truncated, as ``Schema.from_spaces`` makes it of the single
    spaces, and as many lanes as there are environments. The mode is that of the environments' metadata, else ``autoreset_mode``.
    Raises InvalidRequest where these don't fit.
    """

    def __init__(self, collector: Collector, envs: VectorEnvironments, *, autoreset_mode: object = None) -> None:
        mode = envs.metadata.get("autoreset_mode") if autoreset_mode is None else autoreset_mode
        self.mode = getattr(mode, "value", mode)
        if self.mode not in MODES:
            raise InvalidRequest(f"autoreset_mode={shown(mode)}: give the environments' own, one of {', '.join(MODES)}")
        if envs.num_envs != collector.lanes:
            words = f"{envs.num_envs} environments, but collector {collector.name!r} has lanes={collector.lanes}"
            raise InvalidRequest(f"{words}: connect with as many lanes")
        self._collector = collector
        self._envs = envs
        self._obs: Any = None
        self._ended: Bools = np.zeros(envs.num_envs, np.bool_)
        self._runs: Bools = np.zeros(envs.num_envs, np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets the environments, or those of ``options["reset_mask"]``; chains of episodes that this breaks off are cut."""
        mask = options.get("reset_mask") if options is not None else None
        which = np.ones(self._envs.num_envs, np.bool_) if mask is None else np.array(mask, np.bool_)  # Gymnasium takes it out of options
        obs, info = self._envs.reset(seed=seed, options=options)
        self._obs = _kept(obs)
        self._collector.cut(which & self._runs)
        self._ended[which] = self._runs[which] = False
        return obs, info

    def step(self, actions: Any, extra: Mapping[str, object] | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps the environments, writes the transitions and returns what the environments returned.

        ``extra`` gives further fields of the schema. Raises what ``Collector.write`` raises: then this step's transitions are not written,
        or not all of them (their chains are cut), the environments have stepped, and the next step goes on from there.
        """
        if self._obs is None:
            raise InvalidRequest("reset() the environments first")
        if self.mode == "Disabled" and self._ended.any():
            lanes = np.flatnonzero(self._ended).tolist()
            raise InvalidRequest(
                f"lanes {lanes} ended; before the next step reset(options={{'reset_mask': ...}}) them, True where they ended"
            )
        action = _kept(actions)  # before the step: an environment may clip what it is given in place
        stepped = next_obs, reward, terminated, truncated, info = self._envs.step(actions)
        rows = {"obs": self._obs, "action": action, "reward": reward, "next_obs": _kept(next_obs)}
        rows |= {"terminated": terminated, "truncated": truncated, **(extra or {})}
        self._obs = rows["next_obs"]
        only_reset = self._ended if self.mode == "NextStep" else np.zeros_like(self._ended)
        self._ended = np.logical_or(terminated, truncated)
        self._runs = ~self._ended & ~only_reset
        self._write(rows, only_reset, info)
        return stepped

    def _write(self, rows: Mapping[str, Any], only_reset: Bools, info: Mapping[str, Any]) -> None:
        try:
            if self.mode == "SameStep" and self._ended.any():
                final = {"next_obs": _finals(rows["next_obs"], info, self._ended)}
                self._collector.write(rows, final_mask=self._ended, final=final)
            else:
                self._collector.write(rows, mask=~only_reset)
        except RowsRejected:  # this step is missing, so what is written next doesn't follow what was written last
            with contextlib.suppress(ReplayError):
                self._collector.cut(range(self._collector.lanes))
            raise


def _kept(values: Any) -> Any:
    """A copy that later steps don't change: environments made with ``copy=False`` return one array again and again."""
    if isinstance(values, Mapping):
        return {str(name): _kept(part) for name, part in values.items()}
    if isinstance(values, tuple):
        return {str(index): _kept(part) for index, part in enumerate(values)}
    return np.array(values)


def _finals(next_obs: Any, info: Mapping[str, Any], ended: Bools) -> Any:
    """``next_obs`` with the last observations of ``ended`` lanes in their places. Whatever stands in the others' is never read."""
    finals = info.get("final_obs")
    lanes = np.flatnonzero(ended)
    last = [finals[lane] for lane in lanes] if finals is not None and not isinstance(finals, Mapping) else finals
    if last is None or (isinstance(last, list) and any(one is None for one in last)):
        raise RowsRejected(f"lanes {lanes.tolist()} ended in autoreset mode SameStep, but info['final_obs'] lacks their last observations")
    full = _kept(next_obs)
    _set_lanes(full, last, ended)
    return full


def _set_lanes(full: Any, last: Any, ended: Bools) -> None:
    """Puts ``last``, a list with one nested observation for each ended lane or a mapping of full-length arrays, into ``full``."""
    if isinstance(full, dict):
        for name, part in full.items():
            if isinstance(last, Mapping):
                _set_lanes(part, last[name], ended)
            else:
                _set_lanes(part, [one[name] if isinstance(one, Mapping) else one[int(name)] for one in last], ended)
    else:
        full[ended] = np.stack(last) if isinstance(last, list) else np.asarray(last)[ended]
