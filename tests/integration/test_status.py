"""The status report: complete, described key by key, truthful, and given while the data path is saturated."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import jsonschema
import numpy as np
import pytest
from replay_server_client import Collector, Learner, Schema
from support.markers import MARKERS, marker_steps
from support.processes import Children
from support.raw_client import RawCollector, RawLearner
from support.reports import assert_conserved, report_of, wait_report
from support.servers import ServerProcess

from replay_server.status_text import status_lines

SCHEMA: dict[str, Any] = json.loads(files("replay_server").joinpath("status_report.schema.json").read_text("utf-8"))


def check(report: dict[str, Any]) -> dict[str, Any]:
    jsonschema.Draft202012Validator(SCHEMA).validate(report)
    return report


def objects(schema: object) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for part in schema.values():
            yield from objects(part)


def test_the_schema_is_a_schema_that_describes_every_key_and_allows_no_other() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for described in objects(SCHEMA):
        assert described["additionalProperties"] is False
        assert described["required"] == list(described["properties"])
        assert all(part.get("description") for part in described["properties"].values())


def test_an_unknown_or_missing_key_does_not_pass(server: ServerProcess) -> None:
    report = check(report_of(server))
    for spoilt in ({**report, "extra": 1}, {key: value for key, value in report.items() if key != "flow"}):
        with pytest.raises(jsonschema.ValidationError):
            check(spoilt)


def test_before_a_schema_is_known_the_report_says_so(server: ServerProcess) -> None:
    report = check(report_of(server))
    assert (report["phase"], report["schema"], report["ring"]) == ("waiting_for_schema", None, None)
    assert (report["name"], report["pid"]) == (server.name, server.pid)
    assert report["counters"]["rows_published"] == 0


def test_a_busy_servers_report_agrees_with_what_its_clients_did(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "100", "--slot-rows", "16", "--columns", "link,priority", "--moments", "reward,check")
    with (
        Collector.connect(server.name, schema=MARKERS, lanes=4, run_dir=server.run_dir, name="walker") as collector,
        Learner.connect(server.name, run_dir=server.run_dir, device="cpu", name="thinker", prefetch=0) as learner,
    ):
        rows = marker_steps(0, 4, 0, 50)
        mask = np.ones(200, np.bool_)
        mask[::10] = False
        collector.write(rows, mask=mask)
        seq = collector.flush()
        for _ in range(3):
            learner.sample(32, min_committed=seq)
        learner.post("policy", {"w": np.zeros(10, np.float32)})
        report = check(wait_report(server, lambda found: found["learners"][0]["open_leases"] == 0))
        assert_conserved(report)
        ring, counters = report["ring"], report["counters"]
        assert (ring["committed"], ring["tail"], ring["size_rows"], ring["columns"]) == (180, 80, 100, ["link", "priority"])
        assert (counters["rows_masked"], counters["rows_overwritten"], counters["batches_granted"]) == (20, 80, 3)
        walker, thinker = report["collectors"][0], report["learners"][0]
        assert (walker["name"], walker["lanes"], walker["committed_rows"], walker["credits"]) == ("walker", 4, 180, 2)
        assert (thinker["name"], thinker["batches"], thinker["rows"], thinker["is_mapped"]) == ("thinker", 3, 96, True)
        assert (walker["copied_as"], thinker["transport"]) == ("memory", "shared_memory")
        kept = rows["reward"][mask]
        assert report["moments"]["reward"]["mean"] == pytest.approx(kept.mean())
        assert len(report["moments"]["check"]["max"]) == 4
        assert report["mailboxes"]["versions"] == {"policy": 1}
        assert (report["flow"]["state"], report["flow"]["blocked_side"]) == ("free", None)
        assert report["schema"]["row_bytes"] == MARKERS.row_bytes
    ended = check(wait_report(server, lambda found: not found["collectors"] and not found["learners"]))
    assert (ended["ingress"]["segments"], ended["ingress"]["host_bytes"]) == (0, 0)


def test_a_lease_that_blocks_ingest_is_named_with_who_waits_and_since_when(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "8", "--slot-rows", "8", "--headroom", "8", "--lease", "60")
    with RawCollector(server.endpoints, MARKERS, name="walker") as collector:
        collector.publish(1, 0, 8)
        collector.wait_credit(1)
        with RawLearner(server.endpoints, name="thinker") as learner:
            grant = learner.grant(1)
            collector.publish(2, 1, 8)
            collector.wait_credit(2)
            collector.publish(3, 0, 8)
            report = check(wait_report(server, lambda found: found["collectors"][0]["waiting_s"] > 0.05))
            named = rf"1 published slot waits: the first has waited \d+\.\d s for \d+ ring rows that lease {grant.lease} "
            assert re.match(named, report["collectors"][0]["waiting_on"])
            (line,) = (line for line in status_lines(report) if line.startswith("collector"))
            assert re.search(rf"waits \d[^:]*: {named}", line)
            assert (report["flow"]["state"], report["flow"]["blocked_side"]) == ("collectors_wait_for_lease", "collectors")
            assert (report["ingress"]["occupied_slots"], report["ingress"]["waiting_slots"]) == (1, 1)
            assert report["learners"][0]["open_leases"] == 1
            assert report["counters"]["rows_in_flight"] == 8
            learner.release(grant)
            collector.wait_credit(3)


def test_a_waiting_request_is_named(server: ServerProcess) -> None:
    with RawCollector(server.endpoints, MARKERS), RawLearner(server.endpoints, name="thinker") as learner:
        learner.ask(1, min_committed=1000)
        report = check(wait_report(server, lambda found: found["flow"]["state"] == "learners_wait_for_start"))
        assert "rows" in report["learners"][0]["waiting_on"]
        assert report["flow"]["reason"] == report["learners"][0]["waiting_on"].partition(";")[0]


def write_until_stopped(name: str, run_dir: str) -> int:
    import sys

    import numpy as np
    from replay_server_client import Collector, Schema, ServerClosing

    rows = {"obs": np.zeros((4096, 64), np.float32)}
    print("writing", flush=True)
    written = 0
    try:
        with Collector.connect(name, schema=Schema.of(obs=("float32", 64)), run_dir=run_dir) as collector:
            while True:
                collector.write(rows)
                written += 4096
    except ServerClosing:
        print(written, file=sys.stderr)
    return written


def test_it_answers_while_the_data_path_is_saturated(start_server: Callable[..., ServerProcess], children: Children) -> None:
    server = start_server("--capacity", "50000")
    writers = [children.run(write_until_stopped, server.name, str(server.run_dir)) for _ in range(2)]
    wait_report(server, lambda found: len(found["collectors"]) == 2 and found["rates"]["rows_per_s"] > 10_000, within_s=20)
    slowest = 0.0
    for _ in range(30):
        before = time.monotonic()
        report = check(report_of(server))
        slowest = max(slowest, time.monotonic() - before)
        counters = report["counters"]
        assert counters["rows_published"] == counters["rows_committed"] + counters["rows_in_flight"]
    assert slowest < 0.5
    assert server.stop() == 0
    assert all(writer.result() > 0 for writer in writers)


def test_a_flood_of_status_requests_does_not_stop_the_data_path(server: ServerProcess) -> None:
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            report_of(server)

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    try:
        with Collector.connect(server.name, schema=Schema.of(mark="int64"), run_dir=server.run_dir) as collector:
            for mark in range(50):
                collector.write({"mark": np.array([mark])})
                assert collector.flush(2.0) == mark + 1
    finally:
        stop.set()
        for asker in askers:
            asker.join()
