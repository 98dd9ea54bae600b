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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.schema import PlacedField, Schema
from torch import Tensor

from replay_server_client.compiled import HowToRun, plain
from replay_server_client.walk import along, flag_column, flag_columns, flag_role, follow

_KERNEL_WORDS = 128
"""A kernel more costs as much as so many words more in each of 2,048 rows, about 1.9 us on an H200."""
_SERIAL_WORDS = 32_768
"""As many elements torch selects on the CPU without starting a team of threads, which fights the server and the learner's other threads
for the cores (2,048 rows on two busy cores: a median of 20 ms, against 0.5 ms)."""
_SELECTED_BYTES = 2
"""Narrower words cost more, one by one, than a second gather."""
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
    """Adjacent bytes of a row, moved as words of ``word_bytes``, at most ``widest_bytes``."""

    start: int
    end: int
    widest_bytes: int = 8

    @property
    def word_bytes(self) -> int:
        return next(width for width in _WORDS if width <= self.widest_bytes and self.start % width == 0 and self.end % width == 0)

    @property
    def words(self) -> int:
        return (self.end - self.start) // self.word_bytes

    @property
    def cost(self) -> int:
        return _KERNEL_WORDS + self.words

    def view(self, rows: Tensor) -> Tensor:
        return rows[:, self.start : self.end].view(_WORDS[self.word_bytes])

    def mark(self, spans: Iterable[_Span], device: torch.device) -> Tensor:
        """Which of the words lie in ``spans``: bool[words]."""
        is_in = torch.zeros(self.words, dtype=torch.bool)
        for span in spans:
            is_in[span.start // self.word_bytes : span.end // self.word_bytes] = True
        return is_in.to(device)


class NStep:
    """Turns gathered rows into n-step rows, or gathers n-step rows itself (``takes_rows``), in one kernel where that is compiled.

    ``how`` its pure functions are run: plain ones cost less where rows are gathered by themselves.
    """

    def __init__(self, schema: Schema, n_step: int, gamma: float, device: torch.device, how: HowToRun = plain) -> None:
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
        self._row = _Span(0, schema.stride, min((span.word_bytes for span in self._spans), default=1))
        self._is_of_last = self._row.mark(self._spans, device)
        self.takes_rows = how is not plain and device.type == "cuda" and self._row.word_bytes >= _SELECTED_BYTES
        self._powers = torch.tensor([gamma**k for k in range(n_step + 1)], dtype=torch.float64, device=device)
        self._function, self._select = how(n_step_of), how(select_rows)

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
        ``outputs``; no other byte of a row changes. The drawn rows lie in a window that ends at ``committed`` (0-dim int64).

        Where it takes rows, ``rows`` may hold anything before.
        """
        has_ended, is_first = tuple(flag_columns(ring, self._ends)), tuple(flag_columns(ring, self._firsts))
        rewards, terminated = _reward_column(ring, self._reward), flag_column(ring, self._terminated)
        fixed = outputs.n_steps, outputs.discount, outputs.bootstrap
        first, last, reward = self._function(link, drawn_indices, committed, has_ended, is_first, rewards, terminated, self._powers, *fixed)
        if self.takes_rows:
            self._select(self._row.view(ring), first, last, self._is_of_last, self._row.view(rows))
        else:
            self._copy_last(ring, last, rows)
        _reward_column(rows, self._reward).copy_(reward)

    def _copy_last(self, ring: Tensor, last: Tensor, rows: Tensor) -> None:
        for span in self._spans:
            source, target = span.view(ring), span.view(rows)
            at_once = max(1, _SERIAL_WORDS // span.words) if rows.device.type == "cpu" else len(rows)
            for some, part in zip(last.split(at_once), target.split(at_once), strict=True):
                torch.index_select(source, 0, some, out=part)


def select_rows(ring: Tensor, first: Tensor, last: Tensor, is_of_last: Tensor, rows: Tensor) -> None:
    """Fills ``rows[n, words]`` from ``ring[ring_rows, words]``: with words of row ``last`` where ``is_of_last[words]``, else of ``first``.

    The ring indices of all words are made on the way: for compiled use, where they take no memory.
    """
    rows.copy_(ring.gather(0, torch.where(is_of_last, last[:, None], first[:, None])))


def n_step_of(
    link: Tensor,
    indices: Tensor,
    committed: Tensor,
    has_ended: Sequence[Tensor],
    is_first: Sequence[Tensor],
    rewards: Tensor,
    terminated: Tensor,
    powers: Tensor,
    n_steps: Tensor,
    discount: Tensor,
    bootstrap: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Ring indices of the first and the last rows used, and rewards ``[n, elements]``; the last three arguments are filled, as NStepOutputs
    has them.

    ``powers`` are those of gamma from 0 to n_step, float64; columns are ``[ring_rows, …]``.
    """
    trail = follow(link, indices, committed, has_ended, is_first, rows=len(powers) - 1)
    used = trail.is_alive.sum(0)
    last = trail.path.gather(0, used[None] - 1)[0]
    gained = powers.index_select(0, used).float()
    n_steps.copy_(used)
    discount.copy_(gained)
    bootstrap.copy_(torch.where(terminated.index_select(0, last) == 0, gained, 0.0))
    # Not ``indices`` itself, which may lie in one block with the rows: what is compiled next may not write to it by another dtype.
    return trail.path[0].clone(), last, _discounted(along(rewards, trail.path), trail.is_alive, powers[:-1])


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
