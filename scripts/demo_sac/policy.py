"""The actor's forward pass in numpy, so that a collector starts in a moment and never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
LOG_STD_RANGE = (-5.0, 2.0)  # as in sac.py


def act(weights: Mapping[str, NDArray[Any]], obs: Array, rng: np.random.Generator) -> Array:
    """Actions ``(lanes, action)`` in [-1, 1], drawn from the tanh-Gaussian that ``weights`` (SAC.policy_arrays) describe."""
    layer = obs
    names = sorted({name.partition(".")[0] for name in weights}, key=int)
    for name in names:
        layer = layer @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        if name != names[-1]:
            layer = np.maximum(layer, 0)
    mean, log_std = np.split(layer, 2, axis=-1)
    noise = rng.standard_normal(mean.shape, dtype=np.float32)
    return np.tanh(mean + np.exp(np.clip(log_std, *LOG_STD_RANGE)) * noise)


def explore(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Actions before there is a policy: uniform in [-1, 1]."""
    return rng.uniform(-1.0, 1.0, shape).astype(np.float32)
