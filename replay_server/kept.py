"""A server that outlives the script which started it, and whether a living one is what a script asks for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import AttachRefused, InvalidRequest
from replay_server_protocol.schema import Schema

from replay_server.config import ServerConfig

_OF_ITS_OWN = ("name", "run_dir", "schema", "restore", "run_id", "trace", "log_level")
"""Options in which a living server may differ, or that are compared in another way."""


def check_fits(report: Mapping[str, Any], config: ServerConfig) -> None:
    """Raises AttachRefused unless the server of ``report`` belongs to the run and has the options and the schema of ``config``."""
    who = f"server {report['name']!r} (pid {report['pid']})"
    if config.run_id is not None and config.run_id != report["run_id"]:
        raise AttachRefused(f"{who} serves run {report['run_id']!r}, this script belongs to run {config.run_id!r}; choose another name")
    running = report["options"]
    asked = {key: value for key, value in config.report().items() if key not in _OF_ITS_OWN}
    words = [f"{key} is {running.get(key)!r}, not {value!r}" for key, value in asked.items() if running.get(key) != value]
    schema = config.load_schema()
    if schema is not None and report["schema"] is not None:
        words += _schema_differences(report["schema"], schema)
    if words:
        raise AttachRefused(f"{who} already serves, with other options: {'; '.join(words)}; stop it, or choose another name")


def log_path(endpoints: Endpoints) -> Path:
    return endpoints.run_dir / f"{endpoints.name}.log"


def open_log(endpoints: Endpoints) -> IO[bytes]:
    """RUN_DIR/NAME.log, to append to: what a kept server has to say once nobody holds its output. Raises InvalidRequest."""
    path = log_path(endpoints)
    try:
        endpoints.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise InvalidRequest(f"log {path} can't be written: {error.strerror}; choose another run_dir") from error
    return open(fd, "a+b")


def _schema_differences(running: Mapping[str, Any], schema: Schema) -> list[str]:
    if running["fingerprint"] == schema.fingerprint:
        return []
    with contextlib.suppress(KeyError, TypeError):
        theirs = Schema.of(
            {f["name"]: (f["dtype"], tuple(f["shape"])) for f in running["fields"]}, roles=running["roles"], pairs=running["pairs"]
        )
        return [f"schema: {schema.differences(theirs)}"]
    return ["schema is another"]
