"""Looking at a ring on the GPU: the same rows, by copies alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from replay_server_client import Collector, Learner, Observer, Schema
from support.servers import ServerProcess

pytestmark = pytest.mark.gpu

SCHEMA = Schema.of(obs=("float32", 4), stamp="int64", terminated="bool")


def test_observer_and_learner_read_what_was_written(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--device", "cuda", "--columns", "link,priority", "--capacity", "1000")
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Observer.connect(server.name, run_dir=server.run_dir) as observer,
        Learner.connect(server.name, run_dir=server.run_dir, device="cuda") as learner,
    ):
        stamp = np.arange(2700)
        obs = np.repeat(stamp[:, None], 4, 1).astype(np.float32)
        collector.write({"obs": obs, "stamp": stamp, "terminated": stamp % 5 == 4})
        collector.flush()
        for rows in (observer.read(newest=1000), learner.read(newest=1000)):
            assert rows["stamp"].tolist() == rows.seqs.tolist() == list(range(1700, 2700))
            assert (rows["obs"] == rows.seqs[:, None]).all()
        assert observer.read(episode_of=2003)["stamp"].tolist() == list(range(2000, 2005))
        assert observer.read(seqs=[2500, 1800])["stamp"].tolist() == [2500, 1800]
        assert sum(len(chunk.seqs) for chunk in observer.chunks(64)) == 1000
