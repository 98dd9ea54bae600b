"""Compiled functions give what plain ones give; where compiling fails, a warning says why and the plain one does the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replay_server_client import compiled as module
from replay_server_client.compiled import compiled, plain
from replay_server_client.draw import Drawn, Parameters, uniform
from replay_server_client.lap_column import LapColumn
from replay_server_client.prioritized import PriorityDraw, prioritized
from replay_server_client.recent import recent
from replay_server_client.walk import Chains, follow, keep
from torch import Tensor

pytestmark = pytest.mark.timeout(300)

CPU = torch.device("cpu")
RING_ROWS, N = 300, 32


@pytest.fixture(autouse=True)
def _compile_by_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the code generator, which takes its time and needs a compiler."""
    whole = torch.compile

    def compile_by_tracing(function: Callable[..., Any], **options: Any) -> Any:
        return whole(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", compile_by_tracing)
    monkeypatch.setattr(module, "_chosen", {})


def drawn_of(n: int) -> Drawn:
    drawn = Drawn.of(n, CPU)
    Parameters(7, 400, 200).write_to(drawn.parameters.numpy())
    return drawn


def test_draws_are_traced_whole_and_equal_plain_ones() -> None:
    drawn, half_life_rows = drawn_of(N), torch.tensor(40.0, dtype=torch.float64)
    for function, arguments in ((uniform, ()), (recent, (half_life_rows,))):
        expected = function(drawn.parameters, drawn.counters, *arguments, ring_rows=RING_ROWS)
        found = compiled(function)(drawn.parameters, drawn.counters, *arguments, ring_rows=RING_ROWS)
        assert all(map(torch.equal, expected, found))


def test_prioritized_draws_are_traced_whole_and_equal_plain_ones() -> None:
    column = LapColumn.of(torch.ones(RING_ROWS + 1, 2, dtype=torch.int32))
    column.laps[::3] = 2
    column.priorities.copy_(torch.arange(RING_ROWS))
    alpha, beta = torch.tensor((0.6, 0.4), dtype=torch.float64).unbind()
    results = []
    for how in (plain, compiled):
        drawn = drawn_of(N)
        PriorityDraw(CPU, how(prioritized)).draw(drawn, RING_ROWS, column, alpha, beta)
        results.append((drawn.seqs, drawn.indices, drawn.weights))
    assert all(map(torch.equal, *results))


def test_walks_are_traced_whole_and_equal_plain_ones() -> None:
    link, indices = (torch.arange(RING_ROWS) + 4) % RING_ROWS, torch.arange(N)
    ended = torch.arange(RING_ROWS) % 7 == 0

    def walk(link: Tensor, indices: Tensor, committed: Tensor, ended: Tensor) -> Chains:
        return keep(follow(link, indices, committed, [ended], [], 9), indices, 2)

    arguments = link, indices, torch.tensor(RING_ROWS), ended
    assert all(map(torch.equal, walk(*arguments), compiled(walk)(*arguments)))


def test_calls_of_the_same_shapes_share_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    once = module._compile

    def counting(function: Callable[..., Any], *rest: Any) -> Callable[..., Any]:
        counted.append(function.__name__)
        return once(function, *rest)

    monkeypatch.setattr(module, "_compile", counting)
    for n in (8, 8, 16, 8):
        drawn = drawn_of(n)
        compiled(uniform)(drawn.parameters, drawn.counters, ring_rows=RING_ROWS)
    assert counted == ["uniform", "uniform"]


def test_more_shapes_than_dynamo_allows_one_function_are_compiled() -> None:
    for n in range(1, 12):
        drawn = drawn_of(n)
        found = compiled(uniform)(drawn.parameters, drawn.counters, ring_rows=RING_ROWS)
        assert all(map(torch.equal, found, uniform(drawn.parameters, drawn.counters, ring_rows=RING_ROWS)))


def test_where_compiling_fails_a_warning_says_why_and_the_plain_function_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(function: Callable[..., Any], **_options: Any) -> Callable[..., Any]:
        def fail(*_arguments: Any, **_static: Any) -> None:
            raise RuntimeError("no C++\ncompiler\n\nsomewhere deep")

        return fail

    monkeypatch.setattr(torch, "compile", no_compiler)
    drawn = drawn_of(N)
    call = compiled(uniform)
    with pytest.warns(RuntimeWarning, match="^uniform runs uncompiled: RuntimeError: no C\\+\\+ compiler$"):
        found = call(drawn.parameters, drawn.counters, ring_rows=RING_ROWS)
    expected = uniform(drawn.parameters, drawn.counters, ring_rows=RING_ROWS)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, call(drawn.parameters, drawn.counters, ring_rows=RING_ROWS), expected))  # without another warning
