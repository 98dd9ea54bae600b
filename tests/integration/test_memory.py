"""Host memory of ingress depends on slots, never on the capacity; what does not fit is refused and the server lives on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import psutil
import pytest
from replay_server_client import BudgetExceeded, Collector, Schema
from support.reports import report_of
from support.servers import ServerProcess

SMALL_ROW = Schema.of(mark="int64")  # 16 bytes in memory


def test_ingress_host_bytes_are_equal_for_4096_rows_and_10_million(start_server: Callable[..., ServerProcess]) -> None:
    host_bytes, resident = [], []
    for capacity in (4_096, 10_000_000):
        server = start_server("--capacity", str(capacity))
        with Collector.connect(server.name, schema=SMALL_ROW, run_dir=server.run_dir) as collector:
            collector.write({"mark": np.arange(2000)})
            collector.flush()
            report = report_of(server)
            host_bytes.append(report["ingress"]["host_bytes"])
            shared = psutil.Process(server.pid).memory_info()
            resident.append(shared.rss - shared.shared)
            assert report["ring"]["capacity_rows"] == capacity
            assert report["ring"]["host_bytes"] >= report["ring"]["ring_rows"] * 16
        server.stop()
    assert host_bytes == [2 * 512 * 16] * 2
    assert abs(resident[1] - resident[0]) < 8 << 20, "no copy of the ring in the server's own memory"


def test_each_collector_adds_its_slots_and_takes_them_away_again(server: ServerProcess) -> None:
    def host_bytes() -> int:
        found: int = report_of(server)["ingress"]["host_bytes"]
        return found

    with Collector.connect(server.name, schema=SMALL_ROW, run_dir=server.run_dir, name="one"):
        one = host_bytes()
        with Collector.connect(server.name, schema=SMALL_ROW, run_dir=server.run_dir, name="two"):
            assert host_bytes() == 2 * one > 0


def test_a_ring_over_the_budget_is_refused_to_the_collector_and_the_server_lives_on(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", str(2**40))
    with pytest.raises(BudgetExceeded) as refused:
        Collector.connect(server.name, schema=SMALL_ROW, run_dir=server.run_dir)
    needed, free = refused.value.details["needed_bytes"], refused.value.details["free_bytes"]
    assert isinstance(needed, int)
    assert isinstance(free, int)
    assert needed > 16 * 2**40 > free
    report = report_of(server)
    assert (report["phase"], report["ring"], report["ingress"]["segments"]) == ("waiting_for_schema", None, 0)
