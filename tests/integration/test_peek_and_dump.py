"""Rows of a running server in a terminal and in files, by the command itself."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from replay_server_client import Collector, Schema
from support.servers import ServerProcess

from replay_server.cli import main

SCHEMA = Schema.of(obs=("float32", 3), half="bfloat16", mark="int64", terminated="bool")


@pytest.fixture
def reach(start_server: Callable[..., ServerProcess]) -> list[str]:
    """Options that reach a server with 100 rows of one lane, ten to an episode."""
    server = start_server("--columns", "link")
    mark = np.arange(100)
    half = (mark.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    obs = np.repeat(mark[:, None], 3, 1).astype(np.float32)
    obs[99, 0] = np.nan
    with Collector.connect(server.name, schema=SCHEMA, run_dir=server.run_dir) as collector:
        collector.write({"obs": obs, "half": half, "mark": mark, "terminated": mark % 10 == 9})
        collector.flush()
    return ["--name", server.name, "--run-dir", str(server.run_dir)]


def test_peek_prints_the_newest_rows_and_json_lines(reach: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peek", *reach, "--newest", "2"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.split() == ["98", "obs", "[98", "98", "98]", "half", "98", "mark", "98", "terminated", "False"]
    assert last.split()[:3] == ["99", "obs", "[nan"]
    assert main(["peek", *reach, "--seqs", "3,7-8", "--fields", "mark,half", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [{"seq": n, "fields": {"mark": n, "half": float(n)}} for n in (3, 7, 8)]
    assert main(["peek", *reach, "--episode-of", "34", "--fields", "mark", "--json"]) == 0
    assert [json.loads(line)["seq"] for line in capsys.readouterr().out.splitlines()] == list(range(30, 40))
    assert main(["peek", *reach, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["fields"]["obs"][0] == "nan"


@pytest.mark.parametrize("command", [["peek"], ["dump", "rows.npz"]], ids=["peek", "dump"])
def test_a_server_without_a_ring_is_waited_for_no_longer_than_the_timeout(
    server: ServerProcess, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    begin_s = time.monotonic()
    assert main([*command, "--name", server.name, "--run-dir", str(server.run_dir), "--timeout", "0.5"]) == 7
    assert time.monotonic() - begin_s < 10
    assert "no collector has attached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "told"),
    [(["--seqs", "7,100"], "seq 100 is not in the window"), (["--seqs", "9-3"], "--seqs"), (["--fields", "colour"], "colour")],
)
def test_what_is_not_there_is_refused_by_name(reach: list[str], capsys: pytest.CaptureFixture[str], asked: list[str], told: str) -> None:
    assert main(["peek", *reach, *asked]) in (1, 2)
    assert told in capsys.readouterr().err


def test_dump_writes_the_window_as_npz(reach: list[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.npz"
    assert main(["dump", *reach, str(file)]) == 0
    with np.load(file, allow_pickle=False) as found:
        assert set(found) == {"_seq", *SCHEMA.names}
        assert found["_seq"].tolist() == found["mark"].tolist() == list(range(100))
        assert found["obs"].shape == (100, 3)


def test_dump_writes_safetensors_that_its_own_package_can_read(reach: list[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.safetensors"
    assert main(["dump", *reach, "--newest", "5", str(file)]) == 0
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert header["half"]["dtype"] == "BF16"
    begin, end = header["mark"]["data_offsets"]
    assert np.frombuffer(content[8 + length :][begin:end], "<i8").tolist() == [95, 96, 97, 98, 99]
    assert max(tensor["data_offsets"][1] for tensor in header.values()) == len(content) - 8 - length
    found = pytest.importorskip("safetensors.torch").load_file(file)
    assert found["half"].float().tolist() == found["_seq"].tolist() == [95, 96, 97, 98, 99]


def test_a_file_that_can_not_be_is_refused_before_anything_is_read(reach: list[str], tmp_path: Path) -> None:
    assert main(["dump", *reach, str(tmp_path / "rows.csv")]) == 2
    assert main(["dump", *reach, str(tmp_path / "none" / "rows.npz")]) == 2
    assert list(tmp_path.iterdir()) == []
