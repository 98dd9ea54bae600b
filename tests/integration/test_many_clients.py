"""Four collectors of different speeds, masks and flushes, and two learners, at once: order, wholeness, conservation, nothing left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.processes import Children
from support.reports import assert_conserved, report_of, wait_report
from support.servers import ServerProcess

DURATION_S = 10.0
LEASE_S = 0.3


def collect(name: str, run_dir: str, number: int, duration_s: float) -> dict[str, Any]:
    """Writes marker steps for ``duration_s``; every other collector masks rows, sleeps and flushes at random, or fills slots in place."""
    import random
    import time

    import numpy as np
    from replay_server_client import Collector
    from support.markers import MARKERS, marker_steps

    rng, bits = random.Random(number), np.random.default_rng(number)
    lanes, step, kept, slowest_s = number + 1, 0, 0, 0.0
    end = time.monotonic() + duration_s
    with Collector.connect(name, schema=MARKERS, lanes=lanes, name=f"c{number}", run_dir=run_dir, timeout=20.0) as collector:
        while time.monotonic() < end:
            steps = rng.randint(1, 12)
            before = time.monotonic()
            rows = marker_steps(number, lanes, step, steps)
            if number == 3:
                with collector.slot(timeout=20.0) as slot:
                    n = min(steps * lanes, slot.max_rows)
                    for field, values in rows.items():
                        slot[field][:n] = values[:n]
                    slot.rows = n
                steps, kept = n // lanes, kept + n
            else:
                mask = bits.random(steps * lanes) < 0.8 if number % 2 else None
                collector.write(rows, mask=mask)
                kept += int(mask.sum()) if mask is not None else steps * lanes
            slowest_s = max(slowest_s, time.monotonic() - before)
            step += steps
            if rng.random() < (0.02, 0.3, 0.0, 0.01)[number]:
                collector.flush(20.0)
            if number == 1:
                time.sleep(rng.random() * 0.01)
        collector.flush(20.0)
        found = collector.statistics()
        assert found.rows_written == found.rows_committed == kept, found
        assert found.rows_in_flight == found.rows_lost == found.rows_rejected == 0, found
    return {"kept": kept, "slowest_s": slowest_s}


def learn(name: str, run_dir: str, number: int, duration_s: float) -> dict[str, Any]:
    """Samples for ``duration_s``: every row is whole, and one collector's lane has later steps at later seqs."""
    import time

    import numpy as np
    from replay_server_client import Learner
    from support.markers import is_whole

    end, batches, last_committed = time.monotonic() + duration_s, 0, 0
    with Learner.connect(name, device="cpu", name=f"l{number}", prefetch=2 * number, run_dir=run_dir, timeout=20.0) as learner:
        learner.wait_ready(20.0)
        while time.monotonic() < end:
            batch = learner.sample(256, timeout=20.0)
            rows = {field: values.numpy() for field, values in batch.fields.items()}
            seqs = batch.seqs.numpy()
            assert is_whole(rows).all()
            tail, committed = batch.window
            assert tail <= seqs.min()
            assert seqs.max() < committed
            assert committed >= last_committed or number, "a batch asked for again may be younger than the one prefetched after it"
            last_committed = committed
            order = np.lexsort((seqs, rows["lane"], rows["collector"]))
            same = (rows["lane"][order][1:] == rows["lane"][order][:-1]) & (rows["collector"][order][1:] == rows["collector"][order][:-1])
            moved, later = np.diff(seqs[order])[same], np.diff(rows["step"][order])[same]
            assert ((moved > 0) == (later > 0)).all()
            batches += 1
    return {"batches": batches}


@pytest.mark.slow
def test_order_wholeness_and_conservation_hold_with_four_collectors_and_two_learners(
    start_server: Callable[..., ServerProcess], children: Children
) -> None:
    server = start_server("--capacity", "3000", "--slot-rows", "64", "--headroom", "256", "--lease", str(LEASE_S))
    run_dir, duration_s = str(server.run_dir), DURATION_S
    collectors = [children.run(collect, server.name, run_dir, number, duration_s) for number in range(4)]
    learners = [children.run(learn, server.name, run_dir, number, duration_s) for number in range(2)]
    found = [child.result() for child in collectors]
    sampled = [child.result() for child in learners]
    report = wait_report(server, lambda found: not found["collectors"] and not found["learners"])
    assert_conserved(report)
    assert report["counters"]["rows_committed"] == sum(part["kept"] for part in found)
    assert report["counters"]["bad_messages"] == report["counters"]["stale_messages"] == report["counters"]["sessions_lost"] == 0
    assert report["ring"]["committed"] > 10 * 3000, "the ring must have wrapped many times"
    assert min(part["batches"] for part in sampled) > 100
    assert max(part["slowest_s"] for part in found) < LEASE_S + 1.0, (
        "no lease blocks ingest longer than the lease, and a busy machine's second"
    )
    assert (report["ingress"]["segments"], report["ingress"]["occupied_slots"]) == (0, 0)
    assert server.stop() == 0
    assert list(server.run_dir.iterdir()) == []
    assert report_of_is_gone(server)


def report_of_is_gone(server: ServerProcess) -> bool:
    from replay_server_client import ServerGone

    try:
        report_of(server, 0.1)
    except ServerGone:
        return True
    return False
