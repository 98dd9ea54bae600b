"""A shard of several dies by kill -9: of its rows none comes after that, the rest is uniform; restarted it takes part again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from replay_server_client import MultiLearner, ShardLost
from support.processes import Children
from support.servers import ServerProcess, spawn_server
from support.shards import Seen, fill, start_shards


def start_in(children: Children, run_dir: Path, *options: str) -> dict[str, ServerProcess]:
    def start(*given: str, name: str | None = None) -> ServerProcess:
        return spawn_server(children, run_dir, *given, name=name)

    return start_shards(start, *options)


def sweep(children: Children, killed: ServerProcess) -> None:
    """What a killed server leaves is taken away by the next one of its name."""
    stop(spawn_server(children, killed.run_dir, name=killed.name))


def stop(*servers: ServerProcess) -> None:
    assert [server.stop() for server in servers] == [0] * len(servers)


@pytest.mark.parametrize("batches", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_after_kill_9_half_way_the_rest_is_uniform(children: Children, crash_dir: Path, batches: int) -> None:
    servers = start_in(children, crash_dir)
    with MultiLearner.connect(list(servers), device="cpu", run_dir=crash_dir, seed=1, prefetch=2) as learner:
        before, after = Seen(), Seen()
        for _ in range(batches):
            before.add(learner.sample(500))
        epoch = learner.router.epoch
        servers["s1"].kill()
        begun = time.monotonic()
        batch = learner.sample(500)
        assert time.monotonic() - begun < 1, "the learner does not wait for the dead"
        assert batch.epoch == epoch + 1
        for _ in range(batches):
            after.add(batch)
            batch = learner.sample(500)
            assert len(batch) == 500
        assert before.is_uniform, before.chi_square
        assert after.is_uniform, after.chi_square
        assert not after.counts[1].any()
        assert learner.statistics().losses == 1
    stop(servers["s0"], servers["s2"])
    sweep(children, servers["s1"])


def test_a_restarted_shard_takes_part_again_above_its_floor_with_a_new_generation(children: Children, crash_dir: Path) -> None:
    servers = start_in(children, crash_dir, "--columns", "priority")
    with MultiLearner.connect(list(servers), device="cpu", run_dir=crash_dir, floor_rows=(1, 1, 100)) as learner:
        old = learner.sample(600, by="priority")
        servers["s2"].kill()
        learner.update_priorities(old, torch.ones(600))
        stale = old.counts.rows[2]
        assert (learner.statistics().stale_updates, stale > 0) == (stale, True)
        assert not (learner.sample(300)["collector"] == 2).any()
        servers["s2"] = spawn_server(children, crash_dir, "--capacity", "1000", "--slot-rows", "16", "--columns", "priority", name="s2")
        fill(servers["s2"], 2, 0, 99)
        time.sleep(0.15)
        assert not (learner.sample(300)["collector"] == 2).any(), "below its floor"
        fill(servers["s2"], 2, 99, 1)
        end = time.monotonic() + 5
        while learner.sample(300).counts.sizes[2] == 0:
            assert time.monotonic() < end
        batch = learner.sample(300)
        assert batch.counts.generations[2] > old.counts.generations[2]
        assert (batch["collector"] == 2).any()
    stop(*servers.values())


@pytest.mark.slow
def test_a_shard_that_stops_in_good_order_is_lost_too_and_with_raise_it_is_told(children: Children, crash_dir: Path) -> None:
    servers = start_in(children, crash_dir)
    names = list(servers)
    with (
        MultiLearner.connect(names, device="cpu", run_dir=crash_dir, name="a") as one,
        MultiLearner.connect(names, device="cpu", run_dir=crash_dir, name="b", on_loss="raise") as other,
    ):
        one.sample(100), other.sample(100)
        stop(servers["s0"])
        assert not (one.sample(500)["collector"] == 0).any()
        for _ in range(2):
            with pytest.raises(ShardLost, match="'s0' is lost"):
                other.sample(100)
        servers["s1"].kill()
        servers["s2"].kill()
        begun = time.monotonic()
        with pytest.raises(ShardLost, match="no shard is left"):
            one.sample(100, timeout=0.5)
        assert 0.4 < time.monotonic() - begun < 2
    sweep(children, servers["s1"])
    sweep(children, servers["s2"])
