"""How a batch is made: every step between a grant and whole rows, as torch operations into fixed memory.

```
write back ─► draw ─► (windows along links) ─► gather rows ─► lay overlay ─► (n-step)
```

The same steps run on the CPU and inside a captured CUDA graph: no value is read on the host, no shape depends on what is drawn, results
end in fixed memory. What is computed on the way comes from pure functions, which may be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from replay_server_protocol.errors import InvalidRequest
from torch import Tensor

from replay_server_client.batch_buffer import BatchBuffer
from replay_server_client.compiled import HowToRun, plain
from replay_server_client.draw import draw_uniform, uniform
from replay_server_client.lap_column import scatter
from replay_server_client.nstep import NStep, NStepOutputs
from replay_server_client.overlay import Overlay
from replay_server_client.prioritized import PriorityDraw, prioritized
from replay_server_client.recent import draw_recent, recent
from replay_server_client.ring_tensors import RingTensors
from replay_server_client.sequences import WindowOutputs, Windows, windows_of
from replay_server_client.write_back import ALL_ZERO

_FLAGS = ("terminated", "truncated", "first")

Step = Callable[[], object]
Take = Callable[[Tensor, Tensor, Tensor], Step]
"""Makes the step that gathers: (ring rows, indices, batch rows)."""


class Recipe:
    """The steps that fill ``memory`` from ``ring``. Raises InvalidRequest for what schema or server don't have."""

    def __init__(self, memory: BatchBuffer, ring: RingTensors, take: Take, how: HowToRun = plain) -> None:
        self._memory = memory
        self._ring = ring
        self._how = how
        self._committed = torch.zeros((), dtype=torch.int64, device=memory.rows.device)
        steps = [*self._write_back(), self._draw()]
        if memory.request.follows_links:
            steps.append(partial(torch.add, memory.drawn.parameter("tail"), memory.drawn.parameter("size"), out=self._committed))
        n_step = self._n_step()
        gathers = [] if n_step and n_step.takes_rows else [take(ring.rows, memory.indices.view(-1), memory.rows)]
        # Fields with an overlay are none of those that n-step derives, so the two may come in either order.
        self._steps = [*steps, *self._windows(), *gathers, *(self._derive(n_step) if n_step else ()), *self._overlay()]

    def __call__(self) -> None:
        for step in self._steps:
            step()

    def _write_back(self) -> list[Step]:
        memory, ring, drawn = self._memory, self._ring, self._memory.drawn
        tail, counts, steps = drawn.parameter("tail"), memory.write_back.counts, list[Step]()
        if (written := memory.write_back.priorities) is not None:
            column, flag = ring.priorities(), drawn.parameter("has_priorities")
            steps.append(partial(scatter, column, written.update_of(column), drawn.indices, drawn.seqs, tail, flag, counts))
        if (written := memory.write_back.values) is not None and ring.overlay is not None:
            indices, seqs, flag = memory.indices.view(-1), memory.seqs.view(-1), drawn.parameter("has_values")
            steps.append(partial(scatter, ring.overlay, written.update_of(ring.overlay), indices, seqs, tail, flag, counts))
        return steps

    def _draw(self) -> Step:
        request, drawn, ring_rows = self._memory.request, self._memory.drawn, self._ring.ring_rows
        half_life = drawn.parameter("half_life_rows") if request.half_life_rows is not None else None
        if request.is_by_priority:
            column = self._ring.priorities()
            draw = PriorityDraw(drawn.seqs.device, self._how(prioritized))
            draw.all_zero = self._memory.write_back.counts[ALL_ZERO]
            draw.masses, draw.sums = self._memory.results.get("masses"), self._memory.results.get("mass_sums")
            return partial(draw.draw, drawn, ring_rows, column, drawn.parameter("alpha"), drawn.parameter("beta"), half_life)
        if half_life is not None:
            return partial(draw_recent, drawn, ring_rows, half_life, self._how(recent))
        if self._how is plain or drawn.seqs.device.type == "cpu":  # which draws with arrays
            return partial(draw_uniform, drawn, ring_rows)
        return partial(draw_uniform, drawn, ring_rows, self._how(uniform))

    def _windows(self) -> list[Step]:
        memory, ring, request = self._memory, self._ring, self._memory.request
        if not request.length:
            return []
        link, results = ring.links("sequences()"), memory.results
        self._refuse_mutable("sequences()", _FLAGS)
        how = self._how(windows_of)
        windows = Windows(memory.schema, request.length, request.burn_in, request.stride, request.crosses_episodes, how)
        outputs = WindowOutputs(memory.indices, memory.seqs, results["mask"], results["is_first"])
        drawn = memory.drawn
        return [partial(windows.derive, ring.rows, link, drawn.indices, drawn.seqs, self._committed, outputs)]

    def _overlay(self) -> list[Step]:
        memory, column, record = self._memory, self._ring.overlay, self._memory.schema.overlay
        if column is None or record is None:
            return []
        return [partial(Overlay(memory.schema, record, column, memory.rows).lay, memory.indices.view(-1), memory.seqs.view(-1))]

    def _refuse_mutable(self, what: str, roles: Iterable[str], names: Iterable[str] = ()) -> None:
        """What is read of the ring's rows, not of the batch's, must be as it was written."""
        schema = self._memory.schema
        read = {*names, *(schema.roles.get(role) for role in roles)}
        if mutable := [field.name for field in schema if field.mutable and field.name in read]:
            raise InvalidRequest(f"{what} reads {', '.join(mutable)} of later rows, where newer values are not looked up")

    def _n_step(self) -> NStep | None:
        request, schema = self._memory.request, self._memory.schema
        if request.n_step == 1:
            return None
        self._refuse_mutable(f"n_step={request.n_step}", ("reward", *_FLAGS), schema.pairs.values())
        return NStep(schema, request.n_step, request.gamma, self._memory.rows.device, self._how)

    def _derive(self, n_step: NStep) -> list[Step]:
        memory, ring = self._memory, self._ring
        drawn, results = memory.drawn, memory.results
        link = ring.links(f"n_step={memory.request.n_step}")
        outputs = NStepOutputs(results["discount"], results["n_steps"], results["bootstrap"])
        return [partial(n_step.derive, ring.rows, link, drawn.indices, drawn.seqs, self._committed, memory.rows, outputs)]


def take_by_torch(ring_rows: Tensor, indices: Tensor, batch_rows: Tensor) -> Step:
    return partial(torch.index_select, ring_rows, 0, indices, out=batch_rows)


def take_by_numpy(ring_rows: Tensor, indices: Tensor, batch_rows: Tensor) -> Step:
    """On the CPU. torch.index_select would start an OpenMP team there, which fights the server and the learner's other threads for the
    cores (2,048 rows on two busy cores: a median of 4 to 20 ms, against 0.5 ms)."""
    # The draw is in range, so clip clips nothing; the other modes copy ``out``.
    return partial(ring_rows.numpy().take, indices.numpy(), axis=0, out=batch_rows.numpy(), mode="clip")
