"""Rows with mutable fields of several dtypes, whose every value follows from the row's mark; and the priorities of such rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from replay_server_client import Batch, Field, Learner, Schema
from torch import Tensor

STATES = Schema.of(
    flag=Field("bool", mutable=True),
    mark="int64",
    hidden=Field("float32", 3, mutable=True),
    codes=Field("uint8", (3,), mutable=True),
    exact=Field("float64", (2,), mutable=True),
    half=Field("bfloat16", (1, 3), mutable=True),
    count=Field("int64", mutable=True),
    terminated="bool",
    fixed="float32",
)
MUTABLE = ("flag", "hidden", "codes", "exact", "half", "count")


def states(first: int, end: int) -> dict[str, npt.NDArray[np.generic]]:
    """Rows whose every field follows from their mark; episodes of 8."""
    mark = np.arange(first, end)
    return {
        "flag": mark % 2 == 0,
        "mark": mark,
        "hidden": np.repeat(mark[:, None], 3, 1).astype(np.float32),
        "codes": np.repeat(mark[:, None] % 200, 3, 1).astype(np.uint8),
        "exact": np.repeat(mark[:, None], 2, 1) + 1 / 3,
        "half": (np.repeat(mark[:, None, None] % 100, 3, 2).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),
        "count": -mark,
        "terminated": mark % 8 == 7,
        "fixed": mark.astype(np.float32),
    }


def as_written(batch: Batch) -> dict[str, Tensor]:
    """What ``states`` gave the rows of ``batch``, by field."""
    mark = batch["mark"]
    like = {name: tensor.shape for name, tensor in batch.fields.items()}
    flat = mark.reshape(*mark.shape, *[1] * 2)
    wide = {"hidden": mark[..., None].float(), "codes": mark[..., None] % 200, "exact": mark[..., None].double() + 1 / 3}
    wide |= {"half": flat.remainder(100), "flag": mark % 2 == 0, "count": -mark, "fixed": mark.float(), "terminated": mark % 8 == 7}
    return {name: wide[name].to(batch[name].dtype).expand(like[name]) for name in wide}


def newer(batch: Batch, by: int) -> dict[str, Tensor]:
    """Other values of the mutable fields, which follow from the row's mark and ``by``."""
    old = as_written(batch)
    made = {name: old[name] + by for name in MUTABLE if name != "flag"}
    return {"flag": ~old["flag"], **{name: value.to(old[name].dtype) for name, value in made.items()}}


def assert_fields(batch: Batch, expected: dict[str, Tensor], where: Tensor | None = None) -> None:
    for name, value in expected.items():
        found = batch[name]
        chosen = slice(None) if where is None else where
        assert torch.equal(found[chosen], value[chosen]), name


class Priorities:
    """What a learner gave each mark, and what must follow from it; a row without one counts as the largest in the window, 1 if none."""

    def __init__(self) -> None:
        self.given: dict[int, float] = {}

    def update(self, learner: Learner, batch: Batch, priorities: Tensor) -> None:
        learner.update_priorities(batch, priorities)
        self.given.update(zip(batch["mark"].tolist(), priorities.tolist(), strict=True))

    def of(self, window: range) -> npt.NDArray[np.float64]:
        largest = max((self.given[mark] for mark in window if mark in self.given), default=1.0)
        return np.array([self.given.get(mark, largest) for mark in window])

    def check_weights(self, batch: Batch, alpha: float, beta: float) -> None:
        tail, committed = batch.window
        mass = (self.of(range(tail, committed)) ** alpha)[batch["mark"].cpu().numpy() - tail]
        expected = torch.from_numpy((mass.min() / mass) ** beta)
        torch.testing.assert_close(batch.weights.cpu().double(), expected, rtol=1e-5, atol=0)


def of_mark(mark: Tensor) -> Tensor:
    """1 to 5."""
    return (1 + mark % 5).float()
