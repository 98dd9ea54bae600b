"""Waits end when they were told to, with a typed error that names what was missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from replay_server_client import Collector, Learner, ReplayError, ReplayTimeout, Schema, ServerGone
from replay_server_client.gather import HostGather
from replay_server_client.ring_tensors import RingTensors
from support.raw_client import RawCollector, RawLearner
from support.servers import ServerProcess

SCHEMA = Schema.of(mark="int64")
TIMEOUTS_S = (0.0, 0.05, 0.4)


@contextmanager
def raises_in_time(error: type[ReplayError], timeout_s: float, *names: str) -> Iterator[None]:
    """Within 10 % or 20 ms of ``timeout_s``, whichever is larger."""
    before = time.monotonic()
    with pytest.raises(error) as raised:
        yield
    took_s = time.monotonic() - before
    assert timeout_s <= took_s, "before its time"
    assert took_s <= timeout_s + max(0.1 * timeout_s, 0.020), f"{took_s:.3f} s instead of {timeout_s} s"
    for name in names:
        assert name in str(raised.value)


def in_time(error: type[ReplayError], timeout_s: float, call: Callable[[float], object], *names: str) -> None:
    """As ``raises_in_time`` of ``call(timeout_s)``; tried three times, since another process may hold the CPU."""
    for attempt in range(3):
        try:
            with raises_in_time(error, timeout_s, *names):
                call(timeout_s)
        except AssertionError:
            if attempt == 2:
                raise
        else:
            return


@pytest.mark.parametrize("timeout_s", TIMEOUTS_S)
def test_connecting_to_nobody_ends_in_time(crash_dir: object, timeout_s: float) -> None:
    def collector(timeout_s: float) -> object:
        return Collector.connect("nobody", schema=SCHEMA, run_dir=str(crash_dir), timeout=timeout_s)

    def learner(timeout_s: float) -> object:
        return Learner.connect("nobody", device="cpu", run_dir=str(crash_dir), timeout=timeout_s)

    in_time(ServerGone, timeout_s, collector, "nobody", "replay-server serve")
    in_time(ServerGone, timeout_s, learner, "nobody", "replay-server serve")


def test_a_sample_ends_in_time_whatever_is_missing(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "100", "--slot-rows", "16", "--learning-starts", "20")
    with Learner.connect(server.name, run_dir=server.run_dir, device="cpu") as learner:
        for timeout_s in TIMEOUTS_S:
            in_time(ReplayTimeout, timeout_s, lambda t: learner.sample(8, timeout=t), "schema")
            in_time(ReplayTimeout, timeout_s, learner.wait_ready, "schema")
        with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
            collector.write({"mark": np.arange(12)})
            collector.flush()
            in_time(ReplayTimeout, 0.3, lambda t: learner.sample(8, timeout=t), "20", "12")
            in_time(ReplayTimeout, 0.3, learner.wait_ready, "20", "12")
            collector.write({"mark": np.arange(12)})
            collector.flush()
            assert len(learner.sample(8)) == 8
            in_time(ReplayTimeout, 0.3, lambda t: learner.sample(8, min_committed=25, timeout=t), "25", "24")


def test_getting_ready_for_a_ring_is_no_part_of_a_samples_timeout(
    start_server: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where torch.compile takes 12 s at the first batch."""
    bind = HostGather.bind

    def bind_slowly(gather: HostGather, ring: RingTensors) -> None:
        time.sleep(0.25)
        bind(gather, ring)

    monkeypatch.setattr(HostGather, "bind", bind_slowly)
    server = start_server("--capacity", "100")
    with (
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", prefetch=0) as learner,
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
    ):
        collector.write({"mark": np.arange(12)})
        collector.flush()
        learner.wait_ready()
        for n in range(8, 13):  # each a request of its own
            assert len(learner.sample(n, timeout=0.2)) == n


def test_writes_and_flushes_end_in_time_with_the_reason(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "16", "--slot-rows", "16", "--headroom", "16", "--lease", "600")
    with RawCollector(server.endpoints, SCHEMA) as first:
        first.publish(1, 0, 16)
        first.wait_credit(1)
        with (
            RawLearner(server.endpoints) as learner,
            Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir, name="walker") as collector,
        ):
            grant = learner.grant(1)
            collector.write({"mark": np.arange(16)})
            assert collector.flush() == 32
            collector.write({"mark": np.arange(32)})
            for timeout_s in TIMEOUTS_S:
                in_time(ReplayTimeout, timeout_s, collector.flush, f"lease {grant.lease}")
                in_time(ReplayTimeout, timeout_s, lambda t: collector.write({"mark": np.arange(16)}, timeout=t), f"lease {grant.lease}")
            with raises_in_time(ReplayTimeout, 0.2, "slots"), collector.slot(timeout=0.2):
                pass
            learner.release(grant)
            assert collector.flush() == 64


def test_a_timed_out_write_says_how_many_rows_are_in_and_the_rest_may_follow(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "64", "--slot-rows", "16", "--headroom", "16", "--lease", "600")
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
        collector.write({"mark": np.arange(64)})
        collector.flush()
        with RawLearner(server.endpoints) as learner:
            grant = learner.grant(1)
            rows = np.arange(64, 164)
            with pytest.raises(ReplayTimeout) as late:
                collector.write({"mark": rows}, timeout=0.1)
            assert late.value.rows_written == 48, "16 into the headroom, two slots wait"
            learner.release(grant)
            collector.write({"mark": rows[late.value.rows_written :]})
            seq = collector.flush()
            _, found = learner.window(2, "mark", min_committed=seq)
            assert found.tolist() == list(range(100, 164))
