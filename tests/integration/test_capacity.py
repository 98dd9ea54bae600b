"""Capacity counts rows, whatever the chunks in which they come."""

from __future__ import annotations

from replay_server_client import Collector
from support.markers import MARKERS, marker_steps
from support.reports import report_of
from support.servers import ServerProcess

CAPACITY_ROWS = 1000  # of the fixture's server


def test_size_never_passes_the_capacity_in_rows_while_chunks_grow(server: ServerProcess) -> None:
    with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector:
        step, seen = 0, set()
        while step < 10 * CAPACITY_ROWS:
            for rows in range(1, 65):
                collector.write(marker_steps(0, 1, step, rows))
                step += rows
            committed = collector.flush()
            ring = report_of(server)["ring"]
            assert ring["size_rows"] == min(committed, CAPACITY_ROWS)
            assert (ring["committed"], ring["capacity_rows"]) == (committed, CAPACITY_ROWS)
            seen.add((ring["host_bytes"], ring["device_bytes"]))
        assert len(seen) == 1
        assert ring["host_bytes"] >= ring["ring_rows"] * MARKERS.stride
