"""Whatever comes to its sockets, and however much of it, the server serves on, unharmed and no larger; its clients notice nothing.

``scripts/fuzz.py --messages 1000000`` is the same with a million messages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.barrage import OPTIONS, Barrage, Weight, settle, witness_collector, witness_learner
from support.processes import Children
from support.reports import report_of, wait_report
from support.servers import ServerProcess

_WARM_UP, _ROUNDS, _ROUND = 1, 3, 3000
_MOST_GROWTH_BYTES = 16 << 20


@pytest.mark.slow
def test_a_barrage_changes_nothing(start_server: Callable[..., ServerProcess], children: Children, tmp_path: Path) -> None:
    server, stop = start_server(*OPTIONS), tmp_path / "stop"
    collector = children.run(witness_collector, server.name, str(server.run_dir), str(stop), 0.002)
    learner = children.run(witness_learner, server.name, str(server.run_dir), str(stop), 0.002)
    learner.wait_for("sampling")
    resting, barrage = Weight.of(server.pid), Barrage(server.endpoints, seed=5)
    for _ in range(_WARM_UP):
        barrage.fire(_ROUND)
    warm = Weight.of(server.pid)
    for _ in range(_ROUNDS):
        barrage.fire(_ROUND)
    after = settle(server.pid, resting, 15)
    wait_report(server, lambda found: found["counters"]["bad_messages"] >= barrage.malformed)
    committed = report_of(server)["ring"]["committed"]
    wait_report(server, lambda found: found["ring"]["committed"] > committed)
    stop.touch()
    wrote, saw = collector.result(), learner.result()
    assert wrote["written"] == wrote["committed"] > 0
    assert wrote["rejected"] == 0
    assert (saw["broken"], saw["rows"] > 0) == (0, True)
    assert (after.descriptors, after.threads) == (resting.descriptors, resting.threads)
    assert after.rss_bytes - warm.rss_bytes < _MOST_GROWTH_BYTES
