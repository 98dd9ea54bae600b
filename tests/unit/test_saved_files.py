"""A snapshot's files alone: what is written is read back, and any bit that changed is found."""

from __future__ import annotations

import fcntl
import json
import struct
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_server_client import InvalidRequest, Schema
from replay_server_protocol.errors import ProtocolViolation

from replay_server.config import ServerConfig, parse_duration
from replay_server.ring import Ring
from replay_server.saved.directory import SnapshotDirectory, hold
from replay_server.saved.manifest import MANIFEST, Manifest, newest
from replay_server.saved.tensor_file import Array, TensorReader, TensorWriter, header_of

SCHEMA = Schema.of(x="int16", y="float64")
ARRAYS = [Array("y", "float64", 5, ()), Array("x", "int16", 5, (2,))]


def tensor_file(path: Path) -> dict[str, int]:
    with TensorWriter(path, ARRAYS, {"made": "here"}) as file:
        for begin, end in (0, 2), (2, 5):
            file.append("y", np.arange(begin, end, dtype=np.float64).view(np.uint8))
            file.append("x", np.arange(2 * begin, 2 * end, dtype=np.int16).view(np.uint8))
        file.finish()
    return file.crc


def manifest(committed: int = 5) -> Manifest:
    return Manifest(0, committed, 0, SCHEMA, (), {"options": {}}, ())


def test_a_file_is_the_safetensors_format_as_its_page_describes_it(tmp_path: Path) -> None:
    tensor_file(tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert header["__metadata__"] == {"made": "here"}
    assert header["x"] == {"dtype": "I16", "shape": [5, 2], "data_offsets": [40, 60]}
    assert np.frombuffer(content[8 + length + 40 :], np.int16).tolist() == list(range(10))


@given(st.data())
def test_a_changed_bit_or_a_cut_is_always_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("bits") / "a.safetensors"
    crc = tensor_file(path)
    content, header = bytearray(path.read_bytes()), header_of(ARRAYS, {"made": "here"})
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match="safetensors"), TensorReader(path) as reader:
        if reader.header != header:
            raise InvalidRequest("another header than that of the safetensors file expected")
        for name, array in reader.arrays.items():
            reader.read(name, array.rows, np.empty(array.n_bytes, np.uint8))
        reader.check(crc)


def test_a_folder_without_its_manifest_is_no_snapshot_and_is_removed_by_the_next(tmp_path: Path) -> None:
    with SnapshotDirectory.open(tmp_path) as snapshots:
        folder = snapshots.begin(100)
    assert folder.exists()
    with pytest.raises(InvalidRequest, match="no snapshot"):
        newest(tmp_path)
    with SnapshotDirectory.open(tmp_path):
        assert not folder.exists()


def test_two_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with SnapshotDirectory.open(tmp_path), pytest.raises(InvalidRequest, match="another snapshot"), SnapshotDirectory.open(tmp_path):
        pass


def test_one_that_is_being_restored_is_not_deleted(tmp_path: Path) -> None:
    with SnapshotDirectory.open(tmp_path) as snapshots, ExitStack() as held:
        first = snapshots.begin(0)
        (first / MANIFEST).write_text("{}")
        assert hold(first, held, fcntl.LOCK_SH)
        second = snapshots.begin(0)
        (second / MANIFEST).write_text("{}")
        snapshots.keep(1)
        assert first.exists()
        held.close()
        snapshots.keep(1)
        assert not first.exists()
        assert second.exists()


def test_a_manifest_whose_files_leave_rows_out_is_damaged(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(manifest().to_json())
    with pytest.raises(InvalidRequest, match="rows end at seq 0"):
        Manifest.load(tmp_path)


def test_a_restored_ring_begins_with_its_window_and_keeps_its_rows_until_they_are_beyond_capacity() -> None:
    ring = Ring(100, 20)
    ring.restore(450, 500)
    assert (ring.tail, ring.size, ring.committed, ring.oldest_owned_seq) == (450, 50, 500, 450)
    assert ring.missing_rows(70, None) == 0
    assert ring.missing_rows(71, None) == 1
    ring.commit(ring.reserve(60, None))
    assert (ring.tail, ring.size) == (460, 100)
    with pytest.raises(ProtocolViolation):
        ring.restore(0, 10)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10min", 600), ("2h", 7200), ("1d", 86_400), ("45", 45), ("1.5min", 90)])
def test_a_time_may_have_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("given", [{"snapshot_every": "10min"}, {"snapshot_dir": "x"}, {"snapshot_every": "0s", "snapshot_dir": "x"}])
def test_half_a_schedule_is_refused_by_name(given: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="--snapshot-every"):
        ServerConfig.from_options(given)
