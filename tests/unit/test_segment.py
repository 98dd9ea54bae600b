from __future__ import annotations

import errno
import mmap
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_server_protocol import segment as segment_module
from replay_server_protocol.errors import BudgetExceeded, ProtocolViolation
from replay_server_protocol.segment import PAGE_BYTES, Segment, align, segment_dir, segment_name, sweep_segments
from support.leaks import nothing_left
from support.processes import Children


@pytest.fixture
def run_id() -> Iterator[str]:
    """A run id of this test; every segment of it must be gone at the end."""
    run_id = f"t{secrets.token_hex(6)}"
    with nothing_left():
        yield run_id
        left = sweep_segments(run_id)
        assert not left


@pytest.fixture
def small_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A segment folder with room for 16 pages."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    monkeypatch.setattr(segment_module, "segment_dir", lambda: tmp_path)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fill_from_outside(name: str, n_bytes: int) -> int:
    from replay_server_protocol.segment import Segment

    segment = Segment.open(name, n_bytes)
    segment.bytes[:] = 7
    return int(segment.bytes.sum())


def test_two_processes_see_the_same_bytes(run_id: str) -> None:
    segment = Segment.create(segment_name(run_id, "c1"), 3 * PAGE_BYTES)
    assert not segment.bytes.any()
    with Children() as children:
        assert children.run(fill_from_outside, segment.name, segment.n_bytes).result() == 7 * 3 * PAGE_BYTES
    assert (segment.bytes == 7).all()
    segment.unlink()
    segment.close()


def test_mapping_outlives_its_name_on_both_sides(run_id: str) -> None:
    segment = Segment.create(segment_name(run_id, "c1"), PAGE_BYTES)
    other = Segment.open(segment.name, PAGE_BYTES)
    assert segment.is_linked()
    segment.unlink()
    assert not segment.is_linked()
    segment.unlink()
    segment.bytes[5] = 9
    assert other.bytes[5] == 9
    assert other.address != segment.address
    with pytest.raises(ProtocolViolation, match="can't be opened"):
        Segment.open(segment.name, PAGE_BYTES)
    other.close()
    segment.close()


def test_segment_is_private_to_the_user_and_page_aligned(run_id: str) -> None:
    segment = Segment.create(segment_name(run_id, "c1"), 100)
    assert (segment_dir() / segment.name).stat().st_mode & 0o777 == 0o600
    assert segment.address % PAGE_BYTES == 0
    assert len(segment.bytes) == 100
    segment.unlink()
    segment.close()


def test_view_that_is_still_held_stays_readable_after_close(run_id: str) -> None:
    segment = Segment.create(segment_name(run_id, "c1"), PAGE_BYTES)
    view = segment.bytes[:8]
    view[:] = 3
    segment.unlink()
    segment.close()
    segment.close()
    assert len(segment.bytes) == 0
    assert (view == np.full(8, 3)).all()
    del view, segment


def test_name_in_use_is_refused_and_keeps_its_bytes(run_id: str) -> None:
    segment = Segment.create(segment_name(run_id, "c1"), PAGE_BYTES)
    segment.bytes[:] = 1
    with pytest.raises(FileExistsError):
        Segment.create(segment.name, PAGE_BYTES)
    assert segment.is_linked()
    assert segment.bytes.all()
    segment.unlink()
    segment.close()


def test_segment_without_room_is_refused_before_a_byte_is_touched(small_dir: Path) -> None:
    kept = Segment.create("replay-a-kept", 4 * PAGE_BYTES)
    with pytest.raises(BudgetExceeded, match=r"49,152 bytes free, segment replay-a-big needs 1,048,576.*--shm-size") as refusal:
        Segment.create("replay-a-big", 1 << 20)
    assert refusal.value.details == {"needed_bytes": 1 << 20, "free_bytes": 12 * PAGE_BYTES}
    assert isinstance(refusal.value.__cause__, OSError)
    assert [path.name for path in small_dir.iterdir()] == ["replay-a-kept"]
    fits = Segment.create("replay-a-fits", 12 * PAGE_BYTES)
    fits.bytes[:] = 1
    fits.close()
    kept.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EACCES])
def test_failed_allocation_leaves_no_name_and_no_descriptor(run_id: str, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(fd: int, offset: int, n_bytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(BudgetExceeded, match=os.strerror(number) if number == errno.EACCES else "bytes free"):
        Segment.create(segment_name(run_id, "c1"), PAGE_BYTES)
    assert not (segment_dir() / segment_name(run_id, "c1")).exists()


def test_failed_mapping_leaves_no_name_and_no_descriptor(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, n_bytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(BudgetExceeded):
        Segment.create(segment_name(run_id, "c1"), PAGE_BYTES)
    assert not (segment_dir() / segment_name(run_id, "c1")).exists()


def test_all_pages_are_allocated_at_once(run_id: str) -> None:
    segment = Segment.create(segment_name(run_id, "c1"), 64 * PAGE_BYTES)
    assert (segment_dir() / segment.name).stat().st_blocks * 512 == 64 * PAGE_BYTES
    segment.unlink()
    segment.close()


def test_platform_without_fallocate_writes_the_zeros_itself(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    n_bytes = (1 << 20) + 5
    segment = Segment.create(segment_name(run_id, "c1"), n_bytes)
    assert (segment_dir() / segment.name).stat().st_size == n_bytes
    assert not segment.bytes.any()
    segment.unlink()
    segment.close()


def test_segment_smaller_than_promised_is_refused_with_both_sizes(run_id: str) -> None:
    segment = Segment.create(segment_name(run_id, "c1"), PAGE_BYTES)
    with pytest.raises(ProtocolViolation, match="has 4,096 bytes, 4,097 were promised"):
        Segment.open(segment.name, PAGE_BYTES + 1)
    segment.unlink()
    segment.close()


@pytest.mark.parametrize(
    "name", ["", "other", "replay-../../etc/passwd", "/dev/null", "replay-\0", "replay-" + "x" * 300, "replay-missing"]
)
def test_foreign_name_is_a_violation(name: str) -> None:
    with pytest.raises(ProtocolViolation):
        Segment.open(name, PAGE_BYTES)


@pytest.mark.parametrize("n_bytes", [0, -1, 2**63 - 1])
def test_impossible_size_is_a_violation(run_id: str, n_bytes: int) -> None:
    segment = Segment.create(segment_name(run_id, "c1"), PAGE_BYTES)
    with pytest.raises(ProtocolViolation):
        Segment.open(segment.name, n_bytes)
    segment.unlink()
    segment.close()


def test_symbolic_link_is_not_followed(run_id: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(bytes(PAGE_BYTES))
    link = segment_dir() / segment_name(run_id, "link")
    link.symlink_to(target)
    with pytest.raises(ProtocolViolation, match="can't be opened"):
        Segment.open(link.name, PAGE_BYTES)
    link.unlink()


def test_sweep_unlinks_all_of_one_run_and_nothing_else(run_id: str) -> None:
    mine = [Segment.create(segment_name(run_id, part), PAGE_BYTES) for part in ("c1", "ring")]
    strangers = [Segment.create(segment_name(other, "c1"), PAGE_BYTES) for other in (f"{run_id}0", f"x{run_id}")]
    mine[0].bytes[:] = 4
    assert sweep_segments(run_id) == sorted(segment.name for segment in mine)
    assert sweep_segments(run_id) == []
    assert [segment.is_linked() for segment in (*mine, *strangers)] == [False, False, True, True]
    assert (mine[0].bytes == 4).all()
    for segment in (*mine, *strangers):
        segment.unlink()
        segment.close()


def test_sweep_takes_the_run_id_by_letter(run_id: str) -> None:
    segment = Segment.create(segment_name(run_id, "c1"), PAGE_BYTES)
    assert sweep_segments(f"{run_id[:-1]}?") == []
    assert segment.is_linked()
    segment.unlink()
    segment.close()


@given(st.integers(0, 2**60), st.integers(1, 2**30))
def test_align_is_the_next_multiple(n_bytes: int, to: int) -> None:
    aligned = align(n_bytes, to)
    assert aligned % to == 0
    assert 0 <= aligned - n_bytes < to
