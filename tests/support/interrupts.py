"""Calls that end as if Ctrl-C had come at a chosen place: every place at which CPython looks for a signal, one after the other.

It looks where a function of ours begins, after a call returns, and where a loop begins anew; never between plain assignments.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType, ModuleType
from typing import Any


def ended_at(n: int, call: Callable[[], object], *modules: ModuleType) -> bool:
    """``call``, ended by KeyboardInterrupt at the ``n``-th place in these modules that it comes to, from 0; False if it comes to fewer."""
    files, left = {module.__file__ for module in modules}, n
    last: dict[FrameType, int] = {}

    def pass_by() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    def each(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "call":
            frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = each, False, True  # in this order, from Python 3.13 on
            pass_by()
        elif event == "opcode":
            before, last[frame] = last.get(frame), frame.f_lasti
            if before is not None and _name_at(frame.f_code)[before].startswith(("CALL", "JUMP_BACKWARD")):
                pass_by()
        elif event == "return":
            last.pop(frame, None)
        return each

    tracing = sys.gettrace()
    sys.settrace(each)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(tracing)
    return False


@functools.cache
def _name_at(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}
