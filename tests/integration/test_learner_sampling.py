"""A learner and a collector at a real server on the CPU ring: what is written is what is sampled."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from replay_server_client import AttachRefused, Collector, InvalidRequest, Learner, ReplayTimeout, Schema, SchemaMismatch, ServerGone
from support.reports import wait_report
from support.servers import ServerProcess

SCHEMA = Schema.of(obs=("float32", 4), action=("float32", 2), reward="float32", stamp="int64", done="bool")


@pytest.fixture
def collector(server: ServerProcess) -> Iterator[Collector]:
    with Collector.connect(server.name, schema=SCHEMA, lanes=2, run_dir=server.run_dir) as collector:
        yield collector


@pytest.fixture
def learner(server: ServerProcess) -> Iterator[Learner]:
    with Learner.connect(server.name, run_dir=server.run_dir, seed=3) as learner:
        yield learner


def rows(first: int, n: int) -> dict[str, npt.NDArray[np.generic]]:
    """Rows whose every field is a function of ``stamp``."""
    stamp = np.arange(first, first + n)
    return {
        "obs": np.repeat(stamp[:, None], 4, 1).astype(np.float32),
        "action": -np.repeat(stamp[:, None], 2, 1).astype(np.float32),
        "reward": stamp.astype(np.float32) / 2,
        "stamp": stamp,
        "done": stamp % 3 == 0,
    }


def test_sampled_rows_are_the_written_ones(collector: Collector, learner: Learner) -> None:
    collector.write(rows(0, 500))
    committed = collector.flush()
    batch = learner.sample(256, min_committed=committed)
    assert torch.equal(batch["stamp"], batch.seqs)
    assert torch.equal(batch["obs"], batch.seqs[:, None].expand(-1, 4).float())
    assert torch.equal(batch.span("obs", "action", "reward")[:, 4:6], batch["action"])
    assert torch.equal(batch["done"], batch.seqs % 3 == 0)
    assert batch.window == (0, 500)
    assert learner.capacity == 1000
    assert learner.schema is not None
    assert not SCHEMA.differences(learner.schema)


def test_background_thread_makes_the_next_batch_ready(collector: Collector, learner: Learner) -> None:
    collector.write(rows(0, 100))
    collector.flush()
    learner.sample(32)
    waited_s = learner.statistics().waited_s
    for _ in range(20):
        end = time.monotonic() + 5
        while not _is_ready(learner) and time.monotonic() < end:
            time.sleep(0.001)  # the thread runs meanwhile; bounded by the line above
        learner.sample(32)
    assert learner.statistics().waited_s == waited_s


def test_a_steady_loop_rings_no_bell_and_has_every_batch_ready(
    collector: Collector, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ticks of 20 ms. On a busy machine some last longer than one and a half of the shortest: then the thread waits for the bell."""
    collector.write(rows(0, 100))
    collector.flush()
    bells: list[int] = []
    write, n_ready = os.write, 0

    def noted(fd: int, content: bytes) -> int:
        bells.append(fd)
        return write(fd, content)

    monkeypatch.setattr(os, "write", noted)
    for tick in range(60):
        learner.sample(32)
        if tick == 20:
            bells.clear()
        time.sleep(0.02)  # a step of the loop
        n_ready += tick >= 20 and _is_ready(learner)
    assert len(bells) < 20
    assert n_ready > 20


def test_progress_hands_driving_to_the_caller(collector: Collector, learner: Learner) -> None:
    collector.write(rows(0, 100))
    collector.flush()
    learner.sample(32)
    waited_s = learner.statistics().waited_s
    for _ in range(20):
        end = time.monotonic() + 5
        while not _is_ready(learner) and time.monotonic() < end:
            learner.progress()
        learner.sample(32)
    assert learner.statistics().waited_s == waited_s


def test_connect_returns_before_there_is_a_ring_and_sample_says_what_is_missing(learner: Learner) -> None:
    assert learner.capacity is None
    before = time.monotonic()
    with pytest.raises(ReplayTimeout) as error:
        learner.sample(8, timeout=0.5)
    assert time.monotonic() - before < 0.6
    assert len(error.value.message) > len("sample(8) waited 0.50 s: ")


def test_learner_waits_for_learning_starts(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "1000", "--slot-rows", "16", "--learning-starts", "100")
    with (
        Collector.connect(server.name, schema=SCHEMA, lanes=1, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, run_dir=server.run_dir) as learner,
    ):
        collector.write(rows(0, 99))
        collector.flush()
        for wait in (lambda: learner.wait_ready(1.0), lambda: learner.sample(8, timeout=1.0)):
            with pytest.raises(ReplayTimeout, match="need 100 rows before learning starts, have 99"):
                wait()
        collector.write(rows(99, 1))
        collector.flush()
        learner.wait_ready(5.0)
        assert learner.statistics().batches == 0
        assert learner.sample(8).window == (0, 100)


def test_batch_of_more_rows_than_fit_is_refused_with_both_numbers(collector: Collector, learner: Learner) -> None:
    collector.flush()
    with pytest.raises(InvalidRequest, match=r"n=1,001 .* 1,000 rows"):
        learner.sample(1001)


def test_learner_that_expects_another_schema_is_refused_by_field(collector: Collector, server: ServerProcess) -> None:
    expected = Schema.of(obs=("float32", 5))
    with pytest.raises(SchemaMismatch, match="obs"), Learner.connect(server.name, run_dir=server.run_dir, schema=expected) as learner:
        learner.sample(1)


def test_moments_are_the_servers_and_a_field_without_is_named(collector: Collector, learner: Learner) -> None:
    collector.write(rows(0, 102))
    collector.flush()
    assert learner.moments("reward")["mean"] == 25.25
    with pytest.raises(InvalidRequest, match=r"no moments of 'obs'; it keeps: reward; name fields with serve --moments"):
        learner.moments("obs")


def test_unknown_server_is_named_within_the_timeout(server: ServerProcess) -> None:
    before = time.monotonic()
    with pytest.raises(ServerGone, match="nobody"):
        Learner.connect("nobody", run_dir=server.run_dir, timeout=0.3)
    assert time.monotonic() - before < 0.6


def test_learner_of_another_run_is_refused(server: ServerProcess) -> None:
    with pytest.raises(AttachRefused):
        Learner.connect(server.name, run_dir=server.run_dir, run_id="another")


def _is_ready(learner: Learner) -> bool:
    """Looks at the turn's batch without asking for it: a call would wait for it."""
    return next(iter(learner._by_request.values()))._prefetch.ready(0) is not None


def test_a_dropped_learner_ends_also_when_it_had_a_sampler_of_its_own(server: ServerProcess) -> None:
    learner = Learner.connect(server.name, device="cpu", run_dir=server.run_dir)
    learner.sampler(3)
    del learner
    gc.collect()
    wait_report(server, lambda report: not report["learners"])
