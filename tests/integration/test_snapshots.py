"""Snapshots of a running server and servers restored from them: same bits, same draws, sums that go on; damage is refused by name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from replay_server_client import Collector, Field, InvalidRequest, Learner, Observer, ReplayError, Schema
from replay_server_client.status import query
from replay_server_protocol.schema import DTYPES
from support.processes import Children
from support.servers import ServerProcess, spawn_server

from replay_server.saved.manifest import MANIFEST, Manifest, newest
from replay_server.saved.rows import blocks, read_moments
from replay_server.snapshot.writer import Taken, take_snapshot

Start = Callable[..., ServerProcess]

EVERY_DTYPE = Schema.of({f"of_{name}": (name, (3,)) for name in DTYPES} | {"reward": "float32", "stamp": "int64"})
LINKED = Schema.of(obs=("float32", 4), reward=Field("float32", mutable=True), stamp="int64", terminated="bool")
WITH_COLUMNS = ("--columns", "link,priority")


def bits(schema: Schema, first: int, n: int) -> dict[str, npt.NDArray[np.generic]]:
    """Rows of random bits (but for bools and the reward, which are numbers), the same for the same seq."""
    found: dict[str, npt.NDArray[np.generic]] = {}
    for field in schema:
        generators = (np.random.default_rng([seq, field.offset]) for seq in range(first, first + n))
        raw = np.stack([generator.integers(0, 256, field.n_bytes, np.uint8) for generator in generators])
        values = (raw & 1).view(np.bool_) if field.dtype == "bool" else raw.view(field.numpy_dtype)
        found[field.name] = values.reshape(n, *field.shape)
    found["reward"] = np.arange(first, first + n, dtype=np.float32)
    found["stamp"] = np.arange(first, first + n)
    return found


def write(server: ServerProcess, schema: Schema, n: int, first: int = 0, lanes: int = 1) -> None:
    with Collector.connect(server.name, schema=schema, run_dir=server.run_dir, lanes=lanes) as collector:
        for begin in range(first, first + n, 64):
            collector.write(bits(schema, begin, min(64, first + n - begin)))
        collector.flush()


def snapshot(server: ServerProcess, directory: Path, **options: Any) -> Taken:
    with Observer.connect(server.name, run_dir=server.run_dir) as observer:
        return take_snapshot(observer, directory, **options)


def report(server: ServerProcess) -> dict[str, Any]:
    return query(server.endpoints, 5.0)


def held(server: ServerProcess) -> tuple[dict[str, npt.NDArray[np.generic]], tuple[int, int], tuple[npt.NDArray[Any] | None, ...]]:
    """All rows with their newest values, the window, and (next seqs, priorities, laps that are their rows' own)."""
    with Observer.connect(server.name, run_dir=server.run_dir) as observer:
        window, ring_rows = observer.window(), observer.ring().at.ring_rows
        rows = observer.read(newest=1 << 40)
        parts = [(c.seqs.copy(), c.link, c.priority, c.lap) for c in observer.chunks(1 << 20)]
    assert len(parts) == 1
    seqs, link, priority, lap = parts[0]
    if link is None or priority is None or lap is None:
        return rows.fields, window, (None,)
    has = lap == 1 + seqs // ring_rows
    after = np.where(link < 0, -1, seqs + (link - seqs % ring_rows) % ring_rows)
    return rows.fields, window, (after, np.where(has, priority, -1), has)


def assert_same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].tobytes() == values.tobytes(), name


def test_rows_of_every_dtype_are_the_same_bits_after_a_restore_also_into_another_size(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--capacity", "200", "--slot-rows", "16", "--headroom", "40")
    write(server, EVERY_DTYPE, 530)
    taken = snapshot(server, tmp_path / "kept", file_bytes=50 * EVERY_DTYPE.row_bytes)
    assert (taken.manifest.tail, taken.manifest.committed, taken.manifest.left_out) == (330, 530, 0)
    assert len(taken.manifest.files) == 4
    before = report(server)
    for options, first in ((), 330), (("--capacity", "77"), 453), (("--capacity", "1000", "--headroom", "64"), 330):
        restored = start_server("--restore", str(tmp_path / "kept"), *options)
        fields, window, _ = held(restored)
        assert window == (first, 530)
        assert_same(fields, bits(EVERY_DTYPE, first, 530 - first))
        after = report(restored)
        assert after["counters"]["rows_committed"] == before["counters"]["rows_committed"] == 530
        assert after["moments"] == before["moments"]
        write(restored, EVERY_DTYPE, 100, first=530)
        fields, window, _ = held(restored)
        assert window[1] == 630
        assert_same(fields, bits(EVERY_DTYPE, window[0], 630 - window[0]))
        restored.stop()


def test_links_priorities_and_newer_values_come_back_at_their_rows(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--capacity", "300", "--slot-rows", "16", "--headroom", "50", *WITH_COLUMNS)
    write(server, LINKED, 460, lanes=2)
    with Learner.connect(server.name, device="cpu", run_dir=server.run_dir) as learner:
        for value in (1.0, 2.0):
            batch = learner.sample(64, by="priority")
            learner.update_priorities(batch, batch["reward"].abs() + value)
            learner.update(batch, {"reward": -batch["reward"]})
        learner.sample(64, by="priority")
        learner.sample(64, by="priority")
    before = held(server)
    snapshot(server, tmp_path / "kept")
    for ring in (), ("--headroom", "91"):
        after = held(start_server("--restore", str(tmp_path / "kept"), *ring))
        assert_same(after[0], before[0])
        assert after[1] == before[1]
        for found, expected in zip(after[2], before[2], strict=True):
            assert found is not None
            assert expected is not None
            assert (found == expected).all()
    assert before[2][2] is not None
    assert before[2][2].any()
    assert np.signbit(before[0]["reward"].astype(np.float32)).any()


@pytest.mark.parametrize("by", ["uniform", "priority"])
def test_the_same_requests_give_the_same_draws_from_the_same_window(start_server: Start, tmp_path: Path, by: str) -> None:
    server = start_server("--capacity", "300", "--slot-rows", "16", "--seed", "77", *WITH_COLUMNS)
    write(server, LINKED, 500)
    snapshot(server, tmp_path / "kept")

    def draws(of: ServerProcess) -> list[list[int]]:
        with Learner.connect(of.name, device="cpu", run_dir=of.run_dir, seed=5, name="same") as learner:
            return [learner.sample(128, by=by).seqs.tolist() for _ in range(3)]

    assert draws(start_server("--restore", str(tmp_path / "kept"))) == draws(server)
    assert draws(start_server("--restore", str(tmp_path / "kept"), "--seed", "78")) != draws(server)


def test_samples_per_insert_goes_on_without_a_burst(start_server: Start, tmp_path: Path) -> None:
    options = ("--capacity", "1000", "--slot-rows", "16", "--learning-starts", "100", "--samples-per-insert", "2", "--tolerance", "100")
    server = start_server(*options)
    with Collector.connect(server.name, schema=LINKED, run_dir=server.run_dir) as collector:
        collector.write(bits(LINKED, 0, 144))
        collector.flush()
    with Learner.connect(server.name, device="cpu", run_dir=server.run_dir, prefetch=0) as learner:
        for _ in range(10):
            learner.sample(16)
    before = report(server)["flow"]
    snapshot(server, tmp_path / "kept")
    restored = start_server("--restore", str(tmp_path / "kept"))
    restored.child.wait_for("restored ")
    after = report(restored)["flow"]
    assert after["samples_per_insert"] == before["samples_per_insert"] == pytest.approx(160 / 44)
    with Learner.connect(restored.name, device="cpu", run_dir=restored.run_dir, prefetch=0) as learner:
        drawn = 0
        with pytest.raises(TimeoutError):
            for _ in range(20):
                learner.sample(16, timeout=0.3)
                drawn += 16
    assert 160 + drawn <= 2 * 44 + 100 + 16


def test_the_snapshots_options_hold_unless_others_are_given_and_differences_are_told(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--capacity", "200", "--slot-rows", "16", "--seed", "7", "--lease", "0.7")
    write(server, LINKED, 100)
    snapshot(server, tmp_path / "kept")
    restored = start_server("--restore", str(tmp_path / "kept"), "--capacity", "300")
    restored.child.wait_for("restored 100 rows")
    found = report(restored)
    assert (found["ring"]["capacity_rows"], found["ingress"]["slot_rows"]) == (300, 16)
    assert "capacity is 300, the snapshot's was 200" in restored.child.output
    assert "lease is" not in restored.child.output
    time.sleep(0.3)  # some looks at the sums: the rows that came back are no traffic
    found = report(restored)
    assert found["counters"]["rows_committed"] == 100
    assert (found["rates"]["rows_per_s"], found["rates"]["batches_per_s"]) == (0, 0)


def test_while_it_is_being_restored_the_phase_tells_how_far_and_clients_wait(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--capacity", "200", "--slot-rows", "16")
    write(server, LINKED, 150)
    snapshot(server, tmp_path / "kept")
    restored = start_server("--restore", str(tmp_path / "kept"), "--debug-copy-delay", "0.4")
    assert re.fullmatch(r"restoring [0-9]+%", report(restored)["phase"])
    with Observer.connect(restored.name, run_dir=restored.run_dir) as observer:
        with pytest.raises(TimeoutError, match=r"being restored from .*: [0-9]+%"):
            observer.ring(timeout=0.1)
        assert observer.window() == (0, 150)
    fields, _, _ = held(restored)
    assert_same(fields, bits(LINKED, 0, 150))
    assert report(restored)["phase"] == "serving"


def test_stopped_while_it_is_being_restored_it_ends_in_good_order(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--capacity", "200", "--slot-rows", "16")
    write(server, LINKED, 150)
    snapshot(server, tmp_path / "kept")
    assert start_server("--restore", str(tmp_path / "kept"), "--debug-copy-delay", "5").stop() == 0


def test_keep_leaves_the_newest_and_the_number_rises(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--capacity", "200", "--slot-rows", "16")
    for n in range(4):
        write(server, LINKED, 16, first=16 * n)
        snapshot(server, tmp_path / "kept", keep=2)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [".lock", "000003", "000004"]
    assert newest(tmp_path / "kept").committed == 64


def test_an_empty_window_is_no_snapshot_and_leaves_nothing(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--capacity", "200", "--slot-rows", "16")
    with (
        Collector.connect(server.name, schema=LINKED, run_dir=server.run_dir),
        pytest.raises(InvalidRequest, match="no rows to snapshot"),
    ):
        snapshot(server, tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [".lock"]


def test_a_window_that_moves_on_is_kept_as_one_run_of_whole_rows(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--capacity", "1024", "--slot-rows", "64", "--headroom", "128", *WITH_COLUMNS)
    write(server, LINKED, 1500)
    with (
        Observer.connect(server.name, run_dir=server.run_dir) as observer,
        Collector.connect(server.name, schema=LINKED, run_dir=server.run_dir) as collector,
    ):
        written = 1500

        def ingest(progress: object) -> None:
            nonlocal written
            collector.write(bits(LINKED, written, 192))
            collector.flush()
            written += 192

        taken = take_snapshot(observer, tmp_path / "kept", tell=ingest, file_bytes=64 * 41)
    manifest = taken.manifest
    assert manifest.committed == 1500 < written
    assert 0 < manifest.left_out < 1024
    fields, window, _ = held(start_server("--restore", str(taken.path)))
    assert window == (manifest.tail, 1500)
    assert_same(fields, bits(LINKED, manifest.tail, 1500 - manifest.tail))


def test_a_window_that_is_overwritten_as_a_whole_is_no_snapshot_and_the_one_before_stays(start_server: Start, tmp_path: Path) -> None:
    server = start_server("--capacity", "256", "--slot-rows", "64", "--headroom", "128")
    write(server, LINKED, 300)
    before = snapshot(server, tmp_path / "kept")
    with (
        Observer.connect(server.name, run_dir=server.run_dir) as observer,
        Collector.connect(server.name, schema=LINKED, run_dir=server.run_dir) as collector,
    ):
        capture = observer.capture

        def capture_and_wrap(timeout: float | None = 10.0) -> object:
            captured = capture(timeout)
            collector.write(bits(LINKED, 300, 640))
            collector.flush()
            return captured

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(observer, "capture", capture_and_wrap)
            with pytest.raises(ReplayError, match="none could be kept"):
                take_snapshot(observer, tmp_path / "kept")
    assert newest(tmp_path / "kept").path == before.path


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "row bytes": (lambda d: _flip(d / "rows-00000.safetensors", -1), r"rows-00000.*damaged"),
    "header": (lambda d: _flip(d / "rows-00000.safetensors", 30), r"rows-00000"),
    "cut short": (lambda d: (d / "rows-00001.safetensors").write_bytes(b"short"), r"rows-00001.*no safetensors"),
    "another file": (lambda d: shutil.copy(d / "rows-00000.safetensors", d / "rows-00001.safetensors"), r"rows-00001.*another's"),
    "missing": (lambda d: (d / "rows-00001.safetensors").unlink(), r"rows-00001.*can't be opened"),
    "manifest bit": (lambda d: _flip(d / MANIFEST, 60), r"manifest.json"),
    "manifest cut": (lambda d: (d / MANIFEST).write_bytes((d / MANIFEST).read_bytes()[:-40]), r"manifest.json is damaged"),
    "foreign": (lambda d: (d / MANIFEST).write_text('{"a": 1}'), r"not the manifest"),
    "moments": (lambda d: _flip(d / "moments.safetensors", -1), r"moments.*damaged"),
}


def test_what_is_damaged_is_refused_by_name(start_server: Start, children: Children, run_dir: Path, tmp_path: Path) -> None:
    server = start_server("--capacity", "200", "--slot-rows", "16")
    write(server, LINKED, 130)
    taken = snapshot(server, tmp_path / "kept", file_bytes=64 * 29)
    for name, (damage, named) in DAMAGE.items():
        shutil.copytree(taken.path, tmp_path / name)
        damage(tmp_path / name)
        with pytest.raises(InvalidRequest, match=named):
            found = newest(tmp_path / name)
            read_moments(found)
            list(blocks(found, found.tail, 50))
    command = [sys.executable, "-m", "replay_server", "serve", "--device", "cpu", "--run-dir", str(run_dir), "--name", "again"]
    child = children.start([*command, "--restore", str(tmp_path / "row bytes")], name="restored")
    assert child.wait() == 2, child.output
    assert re.search(DAMAGE["row bytes"][1], child.output), child.output


def test_another_schema_is_refused_by_name(start_server: Start, children: Children, run_dir: Path, tmp_path: Path) -> None:
    server = start_server("--capacity", "200", "--slot-rows", "16")
    write(server, LINKED, 20)
    taken = snapshot(server, tmp_path / "kept")
    (tmp_path / "other.json").write_text(json.dumps(Schema.of(obs=("float32", 5), reward="float32").to_wire()))
    command = [
        sys.executable,
        "-m",
        "replay_server",
        "serve",
        "--run-dir",
        str(run_dir),
        "--name",
        "x",
        "--schema",
        str(tmp_path / "other.json"),
    ]
    child = children.start([*command, "--restore", str(taken.path)], name="restored")
    assert child.wait() == 2
    assert "obs is float32[5], not float32[4]" in child.output


def test_the_command_tells_what_it_wrote_and_takes_memory_that_the_ring_does_not_decide(start_server: Start, tmp_path: Path) -> None:
    schema = Schema.of(wide=("uint8", 4096), stamp="int64")
    peaks = []
    for rows in (2_000, 20_000):  # 8 and 80 MB
        server = start_server("--capacity", str(rows), "--slot-rows", "512")
        with Collector.connect(server.name, schema=schema, run_dir=server.run_dir) as collector:
            for first in range(0, rows, 500):
                collector.write({"wide": np.full((500, 4096), first % 251, np.uint8), "stamp": np.arange(first, first + 500)})
            collector.flush()
        command = [sys.executable, "-m", "replay_server", "snapshot", str(tmp_path / str(rows)), "--name", server.name]
        done = subprocess.run([*command, "--run-dir", str(server.run_dir)], capture_output=True, text=True, check=True, timeout=60)
        assert f"{rows:,} rows, seq 0 to {rows}" in done.stdout
        assert "100%" in done.stderr
        peaks.append(int(done.stdout.split("peak memory ")[1].split(" MB")[0].replace(",", "")))
        server.stop()
    assert max(peaks) < 80, peaks
    assert peaks[1] - peaks[0] < 12, peaks


def test_snapshots_from_time_to_time_are_taken_by_a_child_and_restored(start_server: Start, tmp_path: Path) -> None:
    server = start_server(
        "--capacity", "200", "--slot-rows", "16", "--snapshot-every", "1s", "--snapshot-dir", str(tmp_path), "--snapshot-keep", "2"
    )
    write(server, LINKED, 150)
    with Observer.connect(server.name, run_dir=server.run_dir):
        end = time.monotonic() + 20
        while not (tmp_path / "000001" / MANIFEST).exists():
            assert time.monotonic() < end, server.child.output
            time.sleep(0.05)  # the snapshot of another process is no event here; bounded by the line above
    server.stop()
    assert Manifest.load(tmp_path / "000001").committed == 150
    fields, window, _ = held(start_server("--restore", str(tmp_path)))
    assert window == (0, 150)
    assert_same(fields, bits(LINKED, 0, 150))


def test_spawned_elsewhere_a_killed_server_is_outlived(children: Children, crash_dir: Path, tmp_path: Path) -> None:
    server = spawn_server(children, crash_dir, "--capacity", "200", "--slot-rows", "16", name="one")
    write(server, LINKED, 150)
    snapshot(server, tmp_path / "kept")
    server.kill()
    restored = spawn_server(children, crash_dir, "--restore", str(tmp_path / "kept"), name="one")
    fields, _, _ = held(restored)
    assert_same(fields, bits(LINKED, 0, 150))
    assert restored.stop() == 0


def test_killed_at_seeded_points_the_newest_snapshot_is_always_whole() -> None:
    script = Path(__file__).parents[2] / "scripts" / "snapshot_kills.py"
    done = subprocess.run(
        [sys.executable, str(script), "--kills", "2", "--seed", "3"], capture_output=True, text=True, check=False, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed 2" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_two_hundred_seeded_points_the_newest_snapshot_is_always_whole() -> None:
    script = Path(__file__).parents[2] / "scripts" / "snapshot_kills.py"
    done = subprocess.run([sys.executable, str(script), "--kills", "200"], capture_output=True, text=True, check=False, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
