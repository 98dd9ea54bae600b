"""Somebody removes the segments of a running server, as logind does at logout (RemoveIPC): who has mapped them goes on, others are told."""

from __future__ import annotations

import pytest
from replay_server_client import AttachRefused, Collector, Learner
from replay_server_protocol.segment import segment_dir
from support.markers import MARKERS, is_whole, marker_steps
from support.reports import assert_conserved, report_of, wait_report
from support.servers import ServerProcess


def remove_segments(server: ServerProcess) -> int:
    """As ``rm /dev/shm/replay-RUN-*``, of this server alone."""
    run = server.endpoints.lock_path.read_text("utf-8").partition('"run_id": "')[2].partition('"')[0]
    found = list(segment_dir().glob(f"replay-{run}-*"))
    for path in found:
        path.unlink()
    return len(found)


def test_those_who_have_mapped_them_go_on_and_a_new_learner_is_told_why_it_can_not(server: ServerProcess) -> None:
    with (
        Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir) as collector,
        Learner.connect(server.name, device="cpu", run_dir=server.run_dir, name="old") as learner,
    ):
        collector.write(marker_steps(0, 1, 0, 64))
        learner.sample(32, min_committed=collector.flush())
        assert report_of(server)["ring"]["segments_unlinked"] == 0
        assert remove_segments(server) > 0
        wait_report(server, lambda found: found["ring"]["segments_unlinked"] == 1, within_s=1)
        server.child.wait_for("RemoveIPC")
        with (
            Learner.connect(server.name, device="cpu", run_dir=server.run_dir, name="new") as late,
            pytest.raises(AttachRefused, match=r"was removed from .*restart the server"),
        ):
            late.sample(8)
        with Collector.connect(server.name, schema=MARKERS, run_dir=server.run_dir, name="new") as newcomer:
            newcomer.write(marker_steps(1, 1, 0, 64))
            newcomer.flush()
        for step in range(64, 2064, 100):  # round the ring
            collector.write(marker_steps(0, 1, step, 100))
            batch = learner.sample(32, min_committed=collector.flush())
            assert is_whole(batch.fields).all()
        assert_conserved(report_of(server))
