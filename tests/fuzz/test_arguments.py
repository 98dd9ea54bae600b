"""Whatever is passed to a public call, it gives a value or an error of this project: never a bare TypeError, never a hang."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replay_server_client import Collector, Field, InvalidRequest, Learner, ReplayError, Schema
from replay_server_client.admin import Admin
from replay_server_protocol.trace import Trace
from support.markers import MARKERS
from support.oddities import oddities
from support.servers import ServerProcess

from replay_server import ReplayServer
from replay_server.config import ServerConfig

Call = Callable[[Any], object]
SCHEMA = Schema.of(a=("float32", 2), b=Field("int32", cast=True), reward="float32", m=Field("float32", mutable=True), terminated="bool")
_LONG_S = 0.3


def try_all(call: Call, *, is_timeout: bool = False) -> None:
    """Calls with every oddity; waits that would be long or endless as asked are left out."""
    for value in oddities():
        if is_timeout and (value is None or (isinstance(value, int | float | np.integer | np.floating) and value > _LONG_S)):
            continue
        with suppress(ReplayError):
            result = call(value)
            if isinstance(result, Collector | Learner | Admin):
                result.close()


def with_option(call: Callable[..., object], option: str, **others: object) -> Call:
    return lambda value: call(**{**others, option: value})


@pytest.mark.parametrize("option", ["server", "schema", "lanes", "name", "run_dir", "timeout", "counted", "linger", "run_id", "trace"])
def test_collector_connect(option: str, tmp_path: Path) -> None:
    others = {"server": "x", "schema": MARKERS, "run_dir": tmp_path, "timeout": 0}
    try_all(with_option(Collector.connect, option, **others), is_timeout=option == "timeout")


@pytest.mark.parametrize("option", ["server", "device", "seed", "name", "prefetch", "run_dir", "timeout", "schema", "run_id", "trace"])
def test_learner_connect(option: str, tmp_path: Path) -> None:
    others = {"server": "x", "device": "cpu", "run_dir": tmp_path, "timeout": 0}
    try_all(with_option(Learner.connect, option, **others), is_timeout=option == "timeout")


@pytest.mark.parametrize("option", ["name", "run_dir", "timeout"])
def test_admin_connect(option: str, tmp_path: Path) -> None:
    try_all(with_option(Admin.connect, option, name="x", run_dir=tmp_path, timeout=0), is_timeout=option == "timeout")


def test_run_dir_of_a_wrong_type_is_named_and_one_that_is_no_utf8_does_not_hang() -> None:
    for run_dir, words in ((3, "run_dir=3"), ("a\0b", "zero byte"), ("\udcff", "utf-8")):
        with pytest.raises(InvalidRequest, match=words):
            Collector.connect("x", schema=MARKERS, run_dir=run_dir, timeout=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", [*ServerConfig.__dataclass_fields__, "timeout"])
def test_spawn_refuses_before_it_starts_anything(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InvalidRequest("this would start a server")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    try_all(with_option(ReplayServer.spawn, option))


@pytest.mark.parametrize("option", ServerConfig.__dataclass_fields__)
def test_config(option: str) -> None:
    try_all(lambda value: ServerConfig.from_options({option: value}))


@pytest.mark.parametrize("option", ["dtype", "shape", "cast", "mutable"])
def test_field(option: str) -> None:
    try_all(with_option(Field, option, dtype="float32"))


def test_schema() -> None:
    wire = MARKERS.to_wire()
    calls: list[Call] = [
        Field.of,
        Schema.of,
        Schema.from_wire,
        MARKERS.role,
        MARKERS.__getitem__,
        lambda value: Schema.of(a=value),
        lambda value: Schema.of({"a": {"b": value}}),
        lambda value: Schema.from_spaces(value, value),
        lambda value: Schema.from_wire({"fields": [["a", "float32", [value]]]}),
    ]
    calls += [lambda value, at=at: Schema.from_wire({**wire, at: value}) for at in ("fields", "roles", "pairs")]  # type: ignore[misc]
    calls += [lambda value, at=at: Schema.from_wire({**wire, at: {"reward": value}}) for at in ("roles", "pairs")]  # type: ignore[misc]
    calls += [with_option(lambda **given: Schema.of({"reward": "float32"}, **given), at) for at in ("roles", "pairs")]
    calls += [lambda value, at=at: Schema.of({"reward": "float32"}, **{at: {"reward": value}}) for at in ("roles", "pairs")]  # type: ignore[misc]
    for place in range(5):
        whole = ["a", "float32", [1], False, False]
        calls.append(lambda value, p=place, w=whole: Schema.from_wire({"fields": [[*w[:p], value, *w[p + 1 :]]]}))  # type: ignore[misc]
    for call in calls:
        try_all(call)


def rows() -> dict[str, Any]:
    zeros = {field.name: np.zeros((4, *field.shape), field.numpy_dtype) for field in SCHEMA}
    return dict(zeros)


@contextmanager
def collector_of(server: ServerProcess) -> Iterator[Collector]:
    with Collector.connect(server.name, schema=SCHEMA, lanes=2, run_dir=server.run_dir, timeout=5) as collector:
        collector.write(rows())
        collector.flush()
        yield collector


def test_what_a_collector_is_given(server: ServerProcess) -> None:
    with collector_of(server) as collector:

        def in_slot(use: Callable[[Any, Any], object]) -> Call:
            def call(value: Any) -> None:
                with collector.slot() as slot:
                    slot.rows = 0
                    use(slot, value)

            return call

        ends = np.ones(4, np.bool_)
        calls: list[Call] = [
            collector.write,
            lambda value: collector.write(rows(), mask=value),
            lambda value: collector.write(rows(), final_mask=value),
            lambda value: collector.write(rows(), final_mask=ends, final=value),
            lambda value: collector.write(rows(), final_mask=ends, final={"a": value}),
            collector.cut,
            collector.latest,
            lambda value: collector.latest("box", value),
            lambda value: setattr(collector, "policy_version", value),
            in_slot(lambda slot, value: slot[value]),
            in_slot(lambda slot, value: setattr(slot, "rows", value)),
        ]
        calls += [lambda value, n=name: collector.write({**rows(), n: value}) for name in SCHEMA.names]  # type: ignore[misc]
        for call in calls:
            try_all(call)
        for wait in (
            collector.flush,
            lambda value: collector.write(rows(), timeout=value),
            lambda value: collector.latest("box", 0, value),
        ):
            try_all(wait, is_timeout=True)
        collector.policy_version = 0
        collector.write(rows())
        assert collector.flush() > 4


def test_what_a_learner_is_given(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "16", "--columns", "link,priority", "--mailbox-bytes", "1MiB")
    with collector_of(server), Learner.connect(server.name, device="cpu", prefetch=0, run_dir=server.run_dir) as learner:
        for option in ("n", "n_step", "gamma", "min_committed", "alpha", "beta", "by", "max_age_rows", "half_life_rows", "strict"):
            try_all(with_option(learner.sample, option, n=4, timeout=0.02, **({"by": "priority"} if option in ("alpha", "beta") else {})))
        for option in ("n", "length", "burn_in", "stride", "crosses_episodes", "min_committed"):
            try_all(with_option(learner.sequences, option, n=2, length=2, timeout=0.02))
        sampler, batch = learner.sampler(4), learner.sample(4, by="priority")
        arrays = {"w": np.zeros(2)}
        calls: list[Call] = [
            lambda value: next(learner.batches(value, timeout=0.02)),
            sampler.expect,
            lambda value: learner.update_priorities(value, torch.ones(4)),
            lambda value: learner.update_priorities(batch, value),
            lambda value: learner.update(value, {}),
            lambda value: learner.update(batch, value),
            lambda value: learner.update(batch, {"m": value}),
            lambda value: learner.post(value, arrays),
            lambda value: learner.post("box", value),
            lambda value: learner.post("box", {"w": value}),
            learner.moments,
            learner.scalars,
            batch.__getitem__,
            batch.span,
            batch.compact,
        ]
        for call in calls:
            try_all(call)
        for wait in (learner.wait_ready, lambda value: learner.sample(4, timeout=value), lambda value: learner.post("box", arrays, value)):
            try_all(wait, is_timeout=True)
        assert len(learner.sample(4)) == 4


def test_what_an_operator_gives(server: ServerProcess) -> None:
    with Admin.connect(server.name, run_dir=server.run_dir) as admin:
        try_all(lambda value: admin.set(value, "1"))
        try_all(lambda value: admin.set("tolerance", value))
        try_all(lambda value: admin.set("tolerance", "1", timeout=value), is_timeout=True)
        admin.set("tolerance", "5")


def test_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try_all(lambda value: Trace("x", max_spans=value))
    try_all(lambda value: None if isinstance(value, str | bytes) else Trace("x").save(value))
