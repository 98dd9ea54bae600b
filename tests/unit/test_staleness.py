"""Versions in a publish, and how far behind the newest one they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_server_protocol.errors import ProtocolViolation
from replay_server_protocol.versions import MOST_PAIRS, pack_versions, unpack_versions
from support.held_ring import Bench, publish

from replay_server.staleness import Staleness


@given(st.lists(st.integers(0, 40), min_size=1, max_size=200))
def test_pairs_are_few_count_every_row_and_never_look_fresher(versions: list[int]) -> None:
    pairs = unpack_versions(pack_versions(np.array(versions, np.int64)))
    assert len(pairs) <= MOST_PAIRS
    told = [version for version, rows in pairs for _ in range(rows)]
    assert len(told) == len(versions)
    assert all(a <= b for a, b in zip(told, sorted(versions), strict=True))
    assert told[0] == min(versions)
    if len(set(versions)) <= MOST_PAIRS:
        assert told == sorted(versions)


def test_versions_beyond_int64_are_told_as_its_largest() -> None:
    assert unpack_versions(pack_versions(np.array([2**64 - 1], np.uint64))) == [(2**63 - 1, 1)]


def test_bytes_that_are_no_pairs_are_refused() -> None:
    for bad in (bytes(15), bytes(16 * (MOST_PAIRS + 1))):
        with pytest.raises(ProtocolViolation):
            unpack_versions(bad)


def test_buckets_double_and_the_sums_are_exact() -> None:
    staleness = Staleness()
    assert staleness.report() == {"buckets": [], "mean": None, "max": None}
    staleness.note(None, [(0, 7)])  # nothing was posted: nothing can be stale
    assert staleness.report()["mean"] is None
    staleness.note(10, [(12, 1), (10, 1), (9, 2), (8, 3), (7, 4), (6, 5), (5, 6)])
    assert staleness.report()["buckets"] == [
        {"le": 0, "rows": 2},
        {"le": 1, "rows": 2},
        {"le": 2, "rows": 3},
        {"le": 4, "rows": 9},
        {"le": 8, "rows": 6},
    ]
    assert (staleness.report()["mean"], staleness.report()["max"]) == (pytest.approx(70 / 22), 5)
    staleness.note(2**40, [(0, 1), (2**40 - 2**20, 1)])
    assert staleness.report()["buckets"][-2:] == [{"le": 2**20, "rows": 1}, {"le": None, "rows": 1}]  # type: ignore[index]


def test_rows_are_as_stale_as_they_are_at_their_commit() -> None:
    bench = Bench(16, 8)
    collector = bench.collector(4)
    message = publish(1, 0, 2)._replace(versions=pack_versions(np.array([3, 3])))
    bench.ingress.accept(collector, message, 0)
    bench.ingress.drain(0)
    bench.newest_version = 5
    bench.ingress.commit(0)
    bench.ingress.note()
    assert bench.metadata.staleness.report()["max"] is None
    bench.memory.complete(1)
    bench.ingress.commit(0)
    bench.ingress.note()
    assert bench.metadata.staleness.report()["max"] == 2


def test_versions_of_another_number_of_rows_are_refused() -> None:
    bench = Bench(16, 8)
    message = publish(1, 0, 3)._replace(versions=pack_versions(np.array([3, 3])))
    with pytest.raises(ProtocolViolation, match="policy versions are not those of 3 rows"):
        bench.ingress.accept(bench.collector(4), message, 0)
