"""How a learner introduces itself, and which options of ``connect`` can't be."""

from __future__ import annotations

import os
from dataclasses import dataclass

from replay_server_protocol.endpoints import check_name
from replay_server_protocol.errors import InvalidRequest, SchemaMismatch, shown
from replay_server_protocol.messages import Hello
from replay_server_protocol.schema import Schema
from replay_server_protocol.trace import Trace

from replay_server_client.hello import hello_of
from replay_server_client.request import is_count


@dataclass(frozen=True, slots=True)
class LearnerHello:
    """Makes the HELLO of each attach. Apart from the learner, which its connection must not keep alive."""

    name: str
    device_uuid: str | None
    schema: Schema | None
    run_id: str | None

    def __call__(self, nonce: int) -> Hello:
        return hello_of("learner", self.name, nonce, run_id=self.run_id, schema=self.schema, device_uuid=self.device_uuid)


def default_name() -> str:
    """A learner's name where none is given."""
    rank = os.environ.get("RANK", "")
    return f"rank{rank}" if rank.isdecimal() else "learner"


def check_options(seed: object, prefetch: int, compiles: object, schema: object, run_id: str | None, trace: object) -> None:
    """Raises InvalidRequest, or SchemaMismatch, naming the argument of ``connect`` that can't be."""
    if not isinstance(seed, int):
        raise InvalidRequest(f"seed={shown(seed)}: an integer")
    if not is_count(prefetch, 0) or prefetch > 16:
        raise InvalidRequest(f"prefetch={shown(prefetch)}: batches made ready ahead, 0 to 16")
    if not isinstance(compiles, bool):
        raise InvalidRequest(f"compile={compiles!r}: True or False")
    if schema is not None and not isinstance(schema, Schema):
        raise SchemaMismatch(f"schema={shown(schema)}: make one with Schema.of(...)")
    if run_id is not None:
        check_name(run_id, "run_id")
    if trace is not None and not isinstance(trace, Trace):
        raise InvalidRequest(f"trace={shown(trace)}: a Trace, or None")


def check_flags(**flags: object) -> None:
    """Raises InvalidRequest naming the argument that is no bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name}={shown(value)}: True or False")
