"""How a client introduces itself, and a session opened by that."""

from __future__ import annotations

import os
from collections.abc import Callable

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.messages import PROTOCOL_VERSION, Hello, Role
from replay_server_protocol.process import ProcessIdentity, pid_namespace
from replay_server_protocol.schema import Schema

from replay_server_client.connection import Connection
from replay_server_client.deadline import Deadline


def hello_of(
    role: Role,
    name: str,
    nonce: int,
    *,
    run_id: str | None = None,
    schema: Schema | None = None,
    lanes: int = 0,
    counted: bool = False,
    device_uuid: str | None = None,
) -> Hello:
    """The HELLO of this process for one attach."""
    me = ProcessIdentity.current()
    return Hello(
        version=PROTOCOL_VERSION,
        nonce=nonce,
        role=role,
        name=name,
        pid=me.pid,
        start_ticks=me.start_ticks,
        pid_namespace=pid_namespace(),
        run_id=run_id,
        schema=schema.to_wire() if schema is not None else None,
        lanes=lanes,
        counted=counted,
        rows_lost=0,
        device_uuid=device_uuid,
    )


def attached(
    server: str | None, run_dir: str | os.PathLike[str] | None, hello: Callable[[int], Hello], timeout: float | None, process: str
) -> Connection:
    """A connection with a session; texts call it ``process``. Raises what ``Connection.attach`` raises, and nothing is left open then."""
    connection = Connection(Endpoints.resolve(server, run_dir), hello, process=process)
    try:
        connection.attach(Deadline(timeout))
    except BaseException:
        connection.close()
        raise
    return connection
