"""Pure functions of tensors, compiled by torch.compile where a learner asks for it: many tiny kernels become a few.

Compiled code is kept for the process, by function, arguments that are no tensors, and the tensors' shapes and places: batch buffers of
equal requests share it. Nothing is compiled before the first call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor

Function = Callable[..., Any]

_ALIGNMENT_BYTES = 16
_chosen: dict[Hashable, Function] = {}


class HowToRun(Protocol):
    """What makes of a pure function the one that is called."""

    def __call__(self, function: Function) -> Function: ...


def plain(function: Function) -> Function:
    return function


def compiled(function: Function) -> Function:
    """``function``, compiled at its first call, which takes seconds; later calls must be of tensors of the same shapes and places.

    Where compiling fails (no compiler, no Triton) a RuntimeWarning says why, and the plain function does the work.
    """
    chosen: list[Function] = []

    def call(*arguments: Any, **static: Any) -> Any:
        if not chosen:
            chosen.append(_choose(function, arguments, static))
        with torch.no_grad():  # compiled for one mode of autograd; the caller's may be another by then
            return chosen[0](*arguments, **static)

    return call


def _choose(function: Function, arguments: tuple[Any, ...], static: dict[str, Any]) -> Function:
    key = (function, _kind(arguments), tuple(sorted(static.items())))
    if key not in _chosen:
        _chosen[key] = _compile(function, arguments, static)
    return _chosen[key]


def _compile(function: Function, arguments: tuple[Any, ...], static: dict[str, Any]) -> Function:
    # Dynamo counts the variants of a code object, and refuses above 8; a copy of the code is one of its own.
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    found: Function = torch.compile(own, dynamic=False, fullgraph=True)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of the compiler's own parts
            found(*arguments, **static)
    except Exception as error:  # noqa: BLE001 - whatever the compiler lacks, there is another way
        reason = " ".join(str(error).strip().split("\n\n")[0].split())  # what the compiler says, without its advice
        warnings.warn(f"{function.__name__} runs uncompiled: {type(error).__name__}: {reason}", RuntimeWarning, stacklevel=2)
        return function
    return found


def _kind(argument: Any) -> Hashable:
    if isinstance(argument, Tensor):
        place = argument.device, argument.data_ptr() % _ALIGNMENT_BYTES
        return argument.dtype, argument.shape, argument.stride(), *place
    return tuple(map(_kind, argument)) if isinstance(argument, tuple | list) else argument
