"""Looking without touching: rows copied out of a running server by somebody that no count and no limit knows of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from replay_server_client import AttachRefused, Collector, InvalidRequest, Learner, Observer, ReplayTimeout, Schema
from replay_server_client import look as looking
from replay_server_client.admin import Admin
from replay_server_client.bounce import Bounce
from replay_server_client.status import query
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.messages import Grant, Observe
from support.processes import Children
from support.raw_client import RawLearner
from support.reports import wait_report
from support.servers import ServerProcess

SCHEMA = Schema.of(obs=("float32", 4), reward="float32", stamp="int64", terminated="bool", truncated="bool")
EPISODE_ROWS = 5


def rows(first: int, n: int, lanes: int = 1) -> dict[str, npt.NDArray[np.generic]]:
    """Rows whose every field is a function of ``stamp``; of every lane each fifth row is the last of an episode."""
    stamp = np.arange(first, first + n)
    step = stamp // lanes
    return {
        "obs": np.repeat(stamp[:, None], 4, 1).astype(np.float32),
        "reward": stamp.astype(np.float32) / 2,
        "stamp": stamp,
        "terminated": step % EPISODE_ROWS == EPISODE_ROWS - 1,
        "truncated": np.zeros(n, bool),
    }


@pytest.fixture
def collector(server: ServerProcess) -> Iterator[Collector]:
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
        yield collector


@pytest.fixture
def observer(server: ServerProcess) -> Iterator[Observer]:
    with Observer.connect(server.name, run_dir=server.run_dir) as observer:
        yield observer


def report(server: ServerProcess) -> dict[str, Any]:
    return query(Endpoints.resolve(server.name, server.run_dir), 5.0)


def test_what_is_read_is_what_was_written_and_is_a_copy(collector: Collector, observer: Observer) -> None:
    collector.write(rows(0, 300))
    collector.flush()
    assert observer.window() == (0, 300)
    newest = observer.read(newest=7)
    assert newest.seqs.tolist() == list(range(293, 300))
    assert newest["stamp"].tolist() == newest.seqs.tolist()
    assert (newest["obs"] == newest.seqs[:, None]).all()
    assert newest.window == (0, 300)
    asked = observer.read(seqs=[5, 200, 6, 5], fields=["stamp"])
    assert (list(asked.fields), asked["stamp"].tolist(), asked.seqs.tolist()) == (["stamp"], [5, 200, 6, 5], [5, 200, 6, 5])
    observer.read(newest=300)
    assert newest["stamp"].tolist() == list(range(293, 300))
    assert not len(newest.overtaken)


def test_an_observer_is_in_the_report_and_in_no_count(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--learning-starts", "500", "--samples-per-insert", "1", "--tolerance", "2000")
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Observer.connect(server.name, run_dir=server.run_dir, name="eyes") as observer,
    ):
        collector.write(rows(0, 100))
        collector.flush()
        assert len(observer.read(newest=100)) == 100  # before learning starts
        found = report(server)
        (seen,) = found["observers"]
        assert (seen["name"], seen["is_mapped"], seen["open_leases"], seen["state"]) == ("eyes", True, 0, "attached")
        assert seen["transport"] == "shared_memory"
        assert seen["reads"] >= 2
        assert found["learners"] == []
        assert found["flow"]["sampled_rows"] == 0
        assert found["counters"]["batches_dropped"] == found["counters"]["bad_messages"] == found["counters"]["stale_messages"] == 0
        assert found["rates"]["batches_per_s"] == 0
    assert wait_report(server, lambda found: not found["observers"])


def test_a_look_that_outlasts_its_lease_is_in_no_count_either(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "1000", "--lease", "0.05")
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
        collector.write(rows(0, 20))
        collector.flush()
        with RawLearner(server.endpoints, role="observer") as eyes, RawLearner(server.endpoints) as learner:
            for client in (eyes, learner):
                client.send(Observe, 0, 1)
                late = client.receive(Grant)
                wait_report(server, lambda found: not sum(each["open_leases"] for each in (*found["observers"], *found["learners"])))
                client.release(late)
            found = wait_report(server, lambda found: found["observers"][0]["reads"] == 1)
            learner.release(learner.grant(1))  # read after what it sent before
            (seen,) = report(server)["learners"]
            assert (seen["batches"], seen["rows"]) == (1, 1)
            assert found["counters"]["leases_revoked"] == found["counters"]["stale_messages"] == 0


def test_seqs_outside_the_window_are_named(collector: Collector, observer: Observer) -> None:
    collector.write(rows(0, 1500))
    collector.flush()
    with pytest.raises(InvalidRequest, match=r"seqs 3, 1500 are not in the window \[500, 1500\)"):
        observer.read(seqs=[3, 700, 1500])
    with pytest.raises(InvalidRequest, match="exactly one"):
        observer.read(newest=3, seqs=[700])
    with pytest.raises(InvalidRequest, match="newest=0"):
        observer.read(newest=0)
    with pytest.raises(InvalidRequest, match="--columns link"):
        observer.read(episode_of=700)
    assert observer.read(seqs=np.array([700]))["stamp"].tolist() == [700]


def test_an_empty_window_has_no_rows_and_a_server_without_a_ring_is_a_timeout_that_says_so(server: ServerProcess) -> None:
    with Observer.connect(server.name, run_dir=server.run_dir) as observer:
        with pytest.raises(ReplayTimeout, match="no schema yet"):
            observer.window(timeout=0.2)
        with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir):
            assert observer.window() == (0, 0)
            assert len(observer.read(newest=5)) == 0
            assert list(observer.chunks()) == []
            with pytest.raises(InvalidRequest, match="it is empty"):
                observer.read(seqs=[0])


def test_chunks_give_the_whole_window_with_its_side_columns(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--capacity", "1000", "--columns", "link,priority")
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Observer.connect(server.name, run_dir=server.run_dir) as observer,
        Learner.connect(server.name, run_dir=server.run_dir) as learner,
    ):
        collector.write(rows(0, 2700))  # the ring wraps
        collector.flush()
        batch = learner.sample(64, by="priority")
        learner.update_priorities(batch, batch["stamp"].float())
        given = set(batch.seqs.tolist())
        learner.sample(64, by="priority")
        learner.sample(64, by="priority")
        seen, n_given = [], 0
        for chunk in observer.chunks(128):
            assert len(chunk.rows) <= 128
            assert (SCHEMA["stamp"].view(chunk.rows) == chunk.seqs).all()
            assert chunk.link is not None
            assert chunk.priority is not None
            assert chunk.lap is not None
            ring_rows = chunk.ring.at.ring_rows
            is_last = chunk.seqs == 2699
            assert (chunk.link[~is_last] == (chunk.seqs[~is_last] + 1) % ring_rows).all()
            is_own = chunk.lap == 1 + chunk.seqs // ring_rows
            assert (chunk.priority[is_own] == chunk.seqs[is_own]).all()
            n_given += int(is_own.sum())
            seen += chunk.seqs.tolist()
        assert seen == list(range(1700, 2700))
        assert n_given == len(given)


def test_an_episode_is_read_from_its_first_row_to_its_last(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--columns", "link", "--capacity", "400")
    with (
        Collector.connect(server.name, schema=SCHEMA, lanes=3, run_dir=server.run_dir) as collector,
        Observer.connect(server.name, run_dir=server.run_dir) as observer,
        Learner.connect(server.name, run_dir=server.run_dir) as learner,
    ):
        collector.write(rows(0, 900, lanes=3))
        collector.flush()
        first = (750 // 3 // EPISODE_ROWS) * EPISODE_ROWS * 3 + 1
        expected = [first + 3 * i for i in range(EPISODE_ROWS)]
        assert observer.read(episode_of=expected[2])["stamp"].tolist() == expected
        assert learner.read(episode_of=expected[4])["stamp"].tolist() == expected


def test_rows_overtaken_while_they_are_read_are_left_out_and_reported(collector: Collector, observer: Observer) -> None:
    collector.write(rows(0, 1000))
    collector.flush()
    chunks = observer.chunks(100)
    assert next(chunks).seqs.tolist() == list(range(100))
    collector.write(rows(1000, 450))
    collector.flush()
    left = [(chunk.seqs.copy(), chunk.overtaken.copy(), SCHEMA["stamp"].view(chunk.rows).copy()) for chunk in chunks]
    assert np.concatenate([part[0] for part in left]).tolist() == list(range(450, 1000))
    assert np.concatenate([part[1] for part in left]).tolist() == list(range(100, 450))
    assert np.concatenate([part[2] for part in left]).tolist() == list(range(450, 1000))


def test_a_copy_that_outlived_its_lease_is_made_again_and_three_raise(
    start_server: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server("--lease", "0.05", "--capacity", "1000")
    real, late = looking.copy_rows, 0

    def slow(ring: looking.Ring, asked: looking.Seqs, grant: Any, bounce: Bounce) -> looking.CopiedRows:
        nonlocal late
        chunk = real(ring, asked, grant, bounce)
        if late:
            late -= 1
            collector.write(rows(written[0], 600))  # nothing commits over the window before the lease is revoked
            written[0] += 600
            collector.flush(timeout=5.0)
            wait_report(server, lambda found: not found["observers"][0]["open_leases"])  # it was revoked, which no count tells of a look
        return chunk

    monkeypatch.setattr(looking, "copy_rows", slow)
    with (
        Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector,
        Observer.connect(server.name, run_dir=server.run_dir) as observer,
    ):
        written = [1000]
        collector.write(rows(0, 1000))
        collector.flush()
        late = 1
        again = observer.read(seqs=[0, 900])
        assert (again.seqs.tolist(), again.overtaken.tolist(), again["stamp"].tolist()) == ([900], [0], [900])
        late = 3
        with pytest.raises(ReplayTimeout, match="longer than their lease"):
            observer.read(newest=10)


HOLDER = """
import os, sys
from replay_server_client import Observer, look
def copy(*_):
    print("holding", flush=True)
    os.read(0, 1)
look.copy_rows = copy
Observer.connect(sys.argv[1], run_dir=sys.argv[2]).read(newest=10)
"""


def test_a_killed_observer_holds_the_ring_up_no_longer(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--lease", "600")
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
        collector.write(rows(0, 1000))
        collector.flush()
        command = [sys.executable, "-c", HOLDER, server.name, str(server.run_dir)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"holding\n"
            assert report(server)["observers"][0]["open_leases"] == 1
            os.kill(holder.pid, signal.SIGKILL)
        collector.write(rows(1000, 5000))
        assert collector.flush(timeout=10.0) == 6000
        found = report(server)
        assert (found["observers"], found["counters"]["batches_dropped"]) == ([], 0)


WRITER = """
import sys
import numpy as np
from replay_server_client import Collector, Schema
schema = Schema.of(obs=("float32", 4), reward="float32", stamp="int64", terminated="bool", truncated="bool")
with Collector.connect(sys.argv[1], schema=schema, run_dir=sys.argv[2]) as collector:
    first = 0
    while True:
        stamp = np.arange(first, first + 512)
        obs, ends = np.repeat(stamp[:, None], 4, 1).astype(np.float32), np.zeros(512, bool)
        collector.write({"obs": obs, "reward": stamp.astype(np.float32), "stamp": stamp, "terminated": ends, "truncated": ends})
        first += 512
        if first == 5120:
            print("writing", flush=True)
"""


def test_rows_are_whole_while_the_ring_wraps_under_them(server: ServerProcess, children: Children) -> None:
    writer = children.start([sys.executable, "-c", WRITER, server.name, str(server.run_dir)], name="writer")
    writer.wait_for("writing")
    with Observer.connect(server.name, run_dir=server.run_dir) as observer:
        for _ in range(100):
            for chunk in observer.chunks(256):
                assert (SCHEMA["stamp"].view(chunk.rows) == chunk.seqs).all()
                assert (SCHEMA["obs"].view(chunk.rows) == chunk.seqs[:, None].astype(np.float32)).all()
    writer.kill()


def test_an_observer_of_a_host_ring_never_imports_torch(collector: Collector, server: ServerProcess) -> None:
    collector.write(rows(0, 20))
    collector.flush()
    script = (
        "import sys; from replay_server_client import Observer; o = Observer.connect(sys.argv[1], run_dir=sys.argv[2]); "
        "print(len(o.read(newest=5)), 'torch' in sys.modules); o.close()"
    )
    out = subprocess.run([sys.executable, "-c", script, server.name, str(server.run_dir)], capture_output=True, text=True, check=True)
    assert out.stdout == "5 False\n"


def test_a_learner_reads_as_an_observer_does_and_its_counts_stay(collector: Collector, server: ServerProcess) -> None:
    with Learner.connect(server.name, run_dir=server.run_dir) as learner:
        collector.write(rows(0, 300))
        collector.flush()
        newest = learner.read(newest=7)
        assert newest["stamp"].tolist() == newest.seqs.tolist() == list(range(293, 300))
        with pytest.raises(InvalidRequest, match="300"):
            learner.read(seqs=[300])
        assert learner.statistics().batches == 0
        (seen,) = wait_report(server, lambda found: found["learners"][0]["open_leases"] == 0)["learners"]
        assert (seen["batches"], seen["rows"], seen["dropped"]) == (0, 0, 0)
        assert len(learner.sample(32)["stamp"]) == 32


def test_an_observer_of_another_run_is_refused_naming_both(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--run-id", "run-7")
    with pytest.raises(AttachRefused, match=r"'run-8'.*'run-7'"):
        Observer.connect(server.name, run_dir=server.run_dir, run_id="run-8")
    with Observer.connect(server.name, run_dir=server.run_dir, run_id="run-7"):
        pass


def test_a_closed_observer_or_admin_says_so_and_can_be_closed_again(server: ServerProcess, tmp_path: Path) -> None:
    observer, admin = Observer.connect(server.name, run_dir=server.run_dir, name="eyes"), Admin.connect(server.name, run_dir=server.run_dir)
    for client in (observer, admin, observer, admin):
        client.close()
    for call in (observer.window, observer.schema, observer.capture, lambda: observer.read(newest=1), lambda: next(observer.chunks())):
        with pytest.raises(InvalidRequest, match="observer eyes is closed; connect again"):
            call()
    for verb in (lambda: admin.set("tolerance", "3"), admin.stop, admin.trace_start, lambda: admin.trace_stop(tmp_path / "trace.json")):
        with pytest.raises(InvalidRequest, match="admin is closed; connect again"):
            verb()
