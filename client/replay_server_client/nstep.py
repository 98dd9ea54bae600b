"""n-step returns: rows of one step become rows of up to ``n_step`` steps of the same lane and episode, in place.

```
r[0]  r[1]  r[2]              reward      = r[0] + gamma r[1] + gamma² r[2]
  └────►└────►└──► next_X     next_X, terminated, truncated = those of the last row used
   k = 3 rows used            discount    = gamma^k;  bootstrap = discount, 0 where terminated
```

``target = reward + bootstrap * q(next_obs)`` (Sutton and Barto, "Reinforcement Learning", 2nd edition, equation 7.1) is right for every
k. A row uses fewer than ``n_step`` rows where the episode ends (terminated or truncated), at a cut, and at the window's newest row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.schema import PlacedField, Schema
from torch import Tensor

from replay_server_client.walk import along, flag_column, flag_columns, flag_role, follow

_KERNEL_WORDS = 128
"""A kernel more costs as much as so many words more in each of 2,048 rows, about 1.9 us on an H200."""
_SERIAL_WORDS = 32_768
"""As many elements torch selects on the CPU without starting a team of threads, which fights the server and the learner's other threads
for the cores (2,048 rows on two busy cores: a median of 20 ms, against 0.5 ms)."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_REWARD_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class NStepOutputs:
    """What comes on top of a batch's rows; the memory is the caller's."""

    discount: Tensor  # float32[n]: gamma^k
    n_steps: Tensor  # int64[n]: k, how many rows were used
    bootstrap: Tensor  # float32[n]: discount, 0 where terminated


@dataclass(frozen=True, slots=True)
class _Span:
    """Adjacent bytes of a row, moved as words of ``word_bytes``."""

    start: int
    end: int

    @property
    def word_bytes(self) -> int:
        return next(width for width in _WORDS if self.start % width == 0 and self.end % width == 0)

    @property
    def words(self) -> int:
        return (self.end - self.start) // self.word_bytes

    @property
    def cost(self) -> int:
        return _KERNEL_WORDS + self.words

    def view(self, rows: Tensor) -> Tensor:
        return rows[:, self.start : self.end].view(_WORDS[self.word_bytes])


class NStep:
    """Turns gathered rows into n-step rows. ``function`` stands for ``n_step_of``."""

    def __init__(
        self, schema: Schema, n_step: int, gamma: float, device: torch.device, function: Callable[..., tuple[Tensor, ...]] | None = None
    ) -> None:
        """Raises InvalidRequest for a schema without a reward of a floating dtype, terminated, or a pair (next_X of X)."""
        if n_step < 1:
            raise InvalidRequest(f"n_step is at least 1, not {n_step}")
        if not (math.isfinite(gamma) and 0 <= gamma <= 1):
            raise InvalidRequest(f"gamma lies between 0 and 1, not {gamma}")
        self._reward = _reward_of(schema)
        self._terminated = flag_role(schema, "terminated", "n-step")
        self._ends = (self._terminated, *([flag_role(schema, "truncated", "n-step")] if "truncated" in schema.roles else ()))
        self._firsts = [flag_role(schema, "first", "n-step")] if "first" in schema.roles else []
        self._spans = _spans_of([*_next_fields(schema), *self._ends])
        self._powers = torch.tensor([gamma**k for k in range(n_step + 1)], dtype=torch.float64, device=device)
        self._function = function or n_step_of

    def derive(
        self,
        ring: Tensor,
        link: Tensor,
        drawn_indices: Tensor,
        drawn_seqs: Tensor,  # not read: where a row lies in the window follows from its index
        committed: Tensor,
        rows: Tensor,
        outputs: NStepOutputs,
    ) -> None:
        """Overwrites reward, next fields, terminated and truncated of ``rows`` (``uint8[n, stride]``, the drawn rows of ``ring``) and fills
        ``outputs``; no other byte of a row changes. The drawn rows lie in a window that ends at ``committed`` (0-dim int64)."""
        has_ended, is_first = tuple(flag_columns(ring, self._ends)), tuple(flag_columns(ring, self._firsts))
        rewards, terminated = _reward_column(ring, self._reward), flag_column(ring, self._terminated)
        last, *found = self._function(link, drawn_indices, committed, has_ended, is_first, rewards, terminated, self._powers)
        self._copy_last(ring, last, rows)
        fixed = _reward_column(rows, self._reward), outputs.n_steps, outputs.discount, outputs.bootstrap
        for memory, result in zip(fixed, found, strict=True):
            memory.copy_(result)

    def _copy_last(self, ring: Tensor, last: Tensor, rows: Tensor) -> None:
        for span in self._spans:
            source, target = span.view(ring), span.view(rows)
            at_once = max(1, _SERIAL_WORDS // span.words) if rows.device.type == "cpu" else len(rows)
            for some, part in zip(last.split(at_once), target.split(at_once), strict=True):
                torch.index_select(source, 0, some, out=part)


def n_step_of(
    link: Tensor,
    indices: Tensor,
    committed: Tensor,
    has_ended: Sequence[Tensor],
    is_first: Sequence[Tensor],
    rewards: Tensor,
    terminated: Tensor,
    powers: Tensor,
) -> tuple[Tensor, ...]:
    """Ring indices of the last rows used, rewards ``[n, elements]``, n_steps, discount and bootstrap.

    ``powers`` are those of gamma from 0 to n_step, float64; columns are ``[ring_rows, …]``.
    """
    trail = follow(link, indices, committed, has_ended, is_first, rows=len(powers) - 1)
    n_steps = trail.is_alive.sum(0)
    last = trail.path.gather(0, n_steps[None] - 1)[0]
    discount = powers.index_select(0, n_steps).float()
    bootstrap = torch.where(terminated.index_select(0, last) == 0, discount, 0.0)
    return last, _discounted(along(rewards, trail.path), trail.is_alive, powers[:-1]), n_steps, discount, bootstrap


def _discounted(rewards: Tensor, is_alive: Tensor, powers: Tensor) -> Tensor:
    """The sum of ``[n_step, n, elements]`` over the first dimension; in a fixed order, so that CPU and CUDA agree to the bit."""
    sum_dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    # Not a product with ``is_alive``: rows past a walk's end hold anything, NaN too.
    alive = torch.where(is_alive[:, :, None], rewards, 0.0)
    terms = alive * powers[:, None, None].to(sum_dtype)
    first, later = terms[0], terms[1:]
    while len(later) > 1:
        half = len(later) // 2
        later = torch.cat((later[:half] + later[-half:], later[half:-half]))
    return (first + later[0] if len(later) else first).to(rewards.dtype)


def _reward_of(schema: Schema) -> PlacedField:
    if "reward" not in schema.roles:
        raise InvalidRequest(
            "n-step needs the role 'reward', which no field has; name it in Schema.of(..., roles={'reward': FIELD})", role="reward"
        )
    field = schema.role("reward")
    if field.dtype not in _REWARD_DTYPES:
        raise InvalidRequest(
            f"n-step: field {field.name!r} has the role 'reward' and must be one of {', '.join(_REWARD_DTYPES)}, not {field.describe()}",
            role="reward",
        )
    return field


def _next_fields(schema: Schema) -> list[PlacedField]:
    if not schema.pairs:
        raise InvalidRequest(
            "n-step needs a field that holds the next value of another: name it next_X, or in Schema.of(..., pairs={X: NEXT})"
        )
    return [schema[name] for name in schema.pairs.values()]


def _reward_column(rows: Tensor, field: PlacedField) -> Tensor:
    dtype: torch.dtype = getattr(torch, field.dtype)
    return rows[:, field.offset : field.end].view(dtype)


def _spans_of(fields: Iterable[PlacedField]) -> Sequence[_Span]:
    """The fields' bytes as few spans: adjacent ones are joined where the narrower words cost less than a kernel."""
    spans: list[_Span] = []
    for start, end in sorted({(field.offset, field.end) for field in fields}):
        span = _Span(start, end)
        joined = _Span(spans[-1].start, end) if spans and spans[-1].end == start else None
        if joined is not None and joined.cost <= spans[-1].cost + span.cost:
            spans[-1] = joined
        else:
            spans.append(span)
    return spans
