"""The run directory: one living server a name, ours alone, swept after a crash, left empty."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from replay_server_protocol.endpoints import Endpoints
from replay_server_protocol.errors import AlreadyServing, InvalidRequest
from replay_server_protocol.process import ProcessIdentity
from replay_server_protocol.segment import Segment, segment_dir, segment_name

from replay_server.run_directory import RingHolder, RunDirectory


@pytest.fixture
def endpoints(crash_dir: Path) -> Endpoints:
    return Endpoints.resolve("one", crash_dir / "run")


@pytest.fixture
def claimed(endpoints: Endpoints) -> Iterator[RunDirectory]:
    directory = RunDirectory.claim(endpoints)
    yield directory
    directory.release()


def abandon(directory: RunDirectory) -> None:
    """As kill -9 does: the lock goes, the files stay."""
    os.close(directory._lock_fd)


def test_it_is_made_private(claimed: RunDirectory) -> None:
    assert claimed.endpoints.run_dir.stat().st_mode & 0o777 == 0o700


def test_the_name_of_a_living_server_is_refused_with_its_pid(claimed: RunDirectory) -> None:
    with pytest.raises(AlreadyServing, match=f"pid {os.getpid()}"):
        RunDirectory.claim(claimed.endpoints)


def test_another_name_in_the_same_directory_is_free(claimed: RunDirectory) -> None:
    other = RunDirectory.claim(Endpoints.resolve("two", claimed.endpoints.run_dir))
    assert other.run_id != claimed.run_id
    other.release()


def test_release_leaves_nothing_and_frees_the_name(endpoints: Endpoints) -> None:
    first = RunDirectory.claim(endpoints)
    segment = Segment.create(segment_name(first.run_id, "ring"), 4096)
    first.note_holders([RingHolder(1, 1, "learner", first.generation)])
    endpoints.control_path.touch()
    endpoints.status_path.touch()
    first.release()
    segment.close()
    assert not (segment_dir() / segment.name).exists()
    assert not endpoints.run_dir.exists(), "this life made it"
    RunDirectory.claim(endpoints).release()


def test_a_directory_in_the_place_of_a_file_stays_and_the_name_is_free_all_the_same(endpoints: Endpoints) -> None:
    first = RunDirectory.claim(endpoints)
    endpoints.control_path.mkdir()
    endpoints.status_path.touch()
    first.release()
    assert os.listdir(endpoints.run_dir) == [endpoints.control_path.name]
    RunDirectory.claim(endpoints).release()


def test_a_directory_that_was_there_or_that_others_use_stays(endpoints: Endpoints) -> None:
    first = RunDirectory.claim(endpoints)
    second = RunDirectory.claim(Endpoints.resolve("two", endpoints.run_dir))
    first.release()
    assert [path.name for path in endpoints.run_dir.iterdir()] == ["two.lock"]
    second.release()
    assert list(endpoints.run_dir.iterdir()) == [], "the second one found it there"


def test_after_a_crash_the_segments_are_swept_and_the_generation_rises(endpoints: Endpoints) -> None:
    dead = RunDirectory.claim(endpoints)
    names = [segment_name(dead.run_id, part) for part in ("ring", "slots0")]
    for name in names:
        Segment.create(name, 4096).close()
    stranger = Segment.create(segment_name("stranger", f"{os.getpid()}"), 4096)
    abandon(dead)
    alive = RunDirectory.claim(endpoints)
    assert alive.swept == sorted(names)
    assert alive.generation > dead.generation
    assert stranger.is_linked()
    stranger.unlink()
    stranger.close()
    alive.release()


def test_the_generation_rises_even_when_the_clock_was_set_back(endpoints: Endpoints) -> None:
    dead = RunDirectory.claim(endpoints)
    ahead = dead.generation + 10**9
    entry = json.loads(endpoints.lock_path.read_text())
    endpoints.lock_path.write_text(json.dumps({**entry, "generation": ahead}))
    abandon(dead)
    alive = RunDirectory.claim(endpoints)
    assert alive.generation == ahead + 1
    alive.release()


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"run_id": "../../etc", "generation": "x"}', '{"run_id": 7}'])
def test_a_spoilt_lock_file_is_no_reason_not_to_serve(endpoints: Endpoints, text: str) -> None:
    endpoints.run_dir.mkdir(mode=0o700)
    endpoints.lock_path.write_text(text)
    directory = RunDirectory.claim(endpoints)
    assert directory.swept == []
    directory.release()


def test_holders_of_an_earlier_ring_are_those_that_still_live(endpoints: Endpoints) -> None:
    dead = RunDirectory.claim(endpoints)
    me = ProcessIdentity.current()
    alive = RingHolder(me.pid, me.start_ticks, "alive", dead.generation)
    dead.note_holders(
        [alive, RingHolder(me.pid, me.start_ticks + 1, "pid used again", dead.generation), RingHolder(2**22 + 1, 5, "gone", 1)]
    )
    abandon(dead)
    successor = RunDirectory.claim(endpoints)
    assert successor.living_earlier_holders() == [alive]
    successor.release()


def test_holders_that_a_full_disk_kept_out_leave_no_file(endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, _: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    directory = RunDirectory.claim(endpoints)
    monkeypatch.setattr(Path, "replace", fail)
    directory.note_holders([])
    directory.release()
    assert not endpoints.run_dir.exists()


def test_a_directory_open_to_others_is_refused(endpoints: Endpoints) -> None:
    endpoints.run_dir.mkdir(mode=0o700)
    endpoints.run_dir.chmod(0o750)
    with pytest.raises(InvalidRequest, match="chmod 700"):
        RunDirectory.claim(endpoints)
    assert list(endpoints.run_dir.iterdir()) == []


def test_a_symbolic_link_is_no_run_directory(crash_dir: Path) -> None:
    (crash_dir / "real").mkdir(mode=0o700)
    (crash_dir / "link").symlink_to(crash_dir / "real")
    with pytest.raises(InvalidRequest, match="directory"):
        RunDirectory.claim(Endpoints.resolve("one", crash_dir / "link"))


def test_a_lock_that_was_removed_is_taken_again_unless_another_server_was_faster(endpoints: Endpoints) -> None:
    first = RunDirectory.claim(endpoints)
    assert first.is_held()
    shutil.rmtree(endpoints.run_dir)
    assert not first.is_held()
    first.claim_again()
    assert first.is_held()
    with pytest.raises(AlreadyServing):
        RunDirectory.claim(endpoints)
    shutil.rmtree(endpoints.run_dir)
    second = RunDirectory.claim(endpoints)
    with pytest.raises(AlreadyServing, match=f"pid {os.getpid()}"):
        first.claim_again()
    first.release()
    assert second.is_held(), "the first one leaves what is not its own"
    second.release()
    assert not endpoints.run_dir.exists()
