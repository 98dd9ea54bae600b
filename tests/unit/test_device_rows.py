"""Rows on a GPU are published like rows of the host, only later: once their copy was seen done. On a device of host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from replay_server_client import Collector, DeviceError, Field, ReplayTimeout, RowsRejected, Schema, ServerGone, device_rows
from replay_server_client import collector as collector_module
from replay_server_protocol.episodes import unpack_episodes
from replay_server_protocol.messages import Bye, Publish
from replay_server_protocol.versions import unpack_versions
from support.fake_device import FakeDevice
from support.fake_server import FakeServer
from support.leaks import nothing_left

SCHEMA = Schema.of(reward="float32", obs=("float32", 3))
LANES = 2

Attach = Callable[..., Collector]
Rows = dict[str, object]


@pytest.fixture
def server(run_dir: Path) -> Iterator[FakeServer]:
    with nothing_left(), FakeServer(run_dir, moments=("reward",)) as fake:
        yield fake


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Takes the place of CUDA; every tensor of torch is one of its own."""
    fake = FakeDevice()
    monkeypatch.setattr(device_rows, "CudaDevice", lambda name: fake)
    monkeypatch.setattr(collector_module, "on_gpu", first_tensor)
    return fake


@pytest.fixture
def attach(server: FakeServer, device: FakeDevice) -> Iterator[Attach]:
    attached: list[Collector] = []

    def connect(schema: Schema = SCHEMA, **options: object) -> Collector:
        wanted: dict[str, object] = {"lanes": LANES, "linger": 60.0, "timeout": 5.0} | options
        attached.append(Collector.connect(server.name, schema=schema, run_dir=server.run_dir, **wanted))  # type: ignore[arg-type]
        return attached[-1]

    yield connect
    device.complete()
    device.holds_copies = device.has_failed = False
    server.hold_no_more()
    for collector in attached:
        try:
            collector.close()
        except ServerGone:
            continue
    assert device.pinned == []


def first_tensor(rows: object) -> object:
    assert isinstance(rows, dict)
    return next((value for value in rows.values() if isinstance(value, torch.Tensor)), None)


def on_host(first: int, n: int) -> Rows:
    reward = np.arange(first, first + n, dtype=np.float32)
    return {"reward": reward, "obs": np.repeat(reward[:, None], 3, 1)}


def on_gpu(first: int, n: int) -> Rows:
    return {name: torch.from_numpy(array) for name, array in on_host(first, n).items()}


def test_every_dtype_arrives_bit_for_bit(server: FakeServer, attach: Attach) -> None:
    schema = Schema.of(
        reward="float16", flag="bool", count=("int64", (2, 2)), half="bfloat16", byte=("uint8", 5), wide=Field("float32", cast=True)
    )
    rng = np.random.default_rng(1)
    count, byte = rng.integers(-(2**40), 2**40, (8, 2, 2)), rng.integers(0, 256, (8, 5)).astype(np.uint8)
    reward, half, wide = rng.standard_normal(8).astype(np.float16), torch.randn(8).to(torch.bfloat16), rng.standard_normal(8)
    flag = rng.random(8) < 0.5
    rows: Rows = {"reward": torch.from_numpy(reward), "flag": torch.from_numpy(flag), "count": torch.from_numpy(count), "half": half}
    collector = attach(schema)
    collector.write(rows | {"byte": byte, "wide": torch.from_numpy(wide)})
    assert collector.flush() == 8
    assert np.array_equal(server.rows("reward"), reward)
    assert np.array_equal(server.rows("flag"), flag)
    assert np.array_equal(server.rows("count"), count)
    assert np.array_equal(server.rows("half"), half.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(server.rows("byte"), byte)
    assert np.array_equal(server.rows("wide"), wide.astype(np.float32))


def test_write_returns_while_the_copy_is_in_flight_and_a_later_call_publishes(
    server: FakeServer, attach: Attach, device: FakeDevice
) -> None:
    collector = attach()
    device.holds_copies = True
    collector.write(on_gpu(0, 16))
    assert (device.in_flight, server.of(Publish)) == (1, [])
    assert collector.statistics().rows_in_flight == 16
    device.complete()
    collector.write(on_gpu(16, 2))
    assert server.rows("reward").tolist() == list(range(16))


def test_slots_are_handed_over_in_order_and_one_copy_moves_each(server: FakeServer, attach: Attach, device: FakeDevice) -> None:
    collector = attach()
    device.holds_copies = True
    for first in range(0, 32, 4):
        collector.write(on_gpu(first, 4))
    assert device.in_flight == 2
    device.complete(1)
    collector.statistics()
    with pytest.raises(ReplayTimeout):
        collector.flush(timeout=0.05)
    assert server.rows("reward").tolist() == list(range(16))
    device.complete()
    assert collector.flush() == 32
    assert server.rows("obs")[:, 1].tolist() == list(range(32))


def test_full_slots_make_a_write_wait_and_the_rest_can_be_written_again(server: FakeServer, attach: Attach, device: FakeDevice) -> None:
    collector = attach()
    device.holds_copies = True
    with pytest.raises(ReplayTimeout, match="no credit") as late:
        collector.write(on_gpu(0, 40), timeout=0.05)
    assert late.value.rows_written == 32
    device.complete()
    device.holds_copies = False
    collector.write(on_gpu(32, 8))
    collector.flush()
    assert server.rows("reward").tolist() == list(range(40))


def test_host_rows_wait_for_the_device_rows_before_them(server: FakeServer, attach: Attach, device: FakeDevice) -> None:
    collector = attach()
    collector.write(on_host(0, 4))
    device.holds_copies = True
    collector.write(on_gpu(4, 4))
    with pytest.raises(ReplayTimeout, match="the GPU has not finished"):
        collector.write(on_host(8, 4), timeout=0.02)
    device.complete()
    collector.write(on_host(8, 4))
    device.holds_copies = False
    collector.write(on_gpu(12, 4))
    collector.flush()
    assert server.rows("reward").tolist() == list(range(16))


def test_a_lent_slot_follows_device_rows(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    collector.write(on_gpu(0, 4))
    with collector.slot() as slot:
        slot["reward"][:2] = [4, 5]
        slot.rows = 2
    collector.flush()
    assert server.rows("reward").tolist() == list(range(6))


@pytest.mark.parametrize("place", [torch.from_numpy, np.asarray])
def test_masks_and_finals_may_lie_on_either_side(
    server: FakeServer, attach: Attach, place: Callable[[np.ndarray[tuple[int], np.dtype[np.bool_]]], object]
) -> None:
    mask, ends = np.array([True, False, True, True]), np.array([False, True, True, False])
    final = -on_host(0, 4)["obs"] - 1  # type: ignore[operator]
    collector = attach()
    collector.write(on_gpu(0, 4))
    collector.write(on_gpu(0, 4), mask=place(mask), final_mask=place(ends), final={"obs": place(final)})
    collector.write(on_gpu(4, 2))
    assert collector.flush() == 9
    assert server.rows("reward").tolist() == [0, 1, 2, 3, 0, 2, 3, 4, 5]
    assert server.rows("obs")[:, 0].tolist() == [0, 1, 2, 3, 0, -3, 3, 4, 5]
    statistics = collector.statistics()
    assert (statistics.rows_written, statistics.rows_masked, statistics.rows_committed) == (9, 1, 9)


def test_slot_of_masked_rows_alone_is_free_again(server: FakeServer, attach: Attach) -> None:
    collector = attach()
    for _ in range(5):
        collector.write(on_gpu(0, 16), mask=torch.zeros(16, dtype=torch.bool))
    assert (collector.flush(), server.of(Publish)) == (0, [])
    assert collector.statistics().free_slots == 2
    assert collector.statistics().rows_masked == 80


@pytest.mark.parametrize("seed", range(12))
def test_chains_and_policy_are_those_of_host_rows(run_dir: Path, device: FakeDevice, seed: int) -> None:
    """The same calls, once from the host and once from a device whose copies end late: same rows, lanes, cuts, and counts."""
    host, gpu = (Transcript(run_dir, seed).played(convert, device) for convert in (np.asarray, torch.from_numpy))
    assert host.rewards == gpu.rewards
    assert host.lanes == gpu.lanes
    assert host.counts == gpu.counts
    assert any(lane < 0 for lane in host.lanes)


class Transcript:
    """What a random run of writes, masks, finals, cuts and bad rewards has published."""

    def __init__(self, run_dir: Path, seed: int) -> None:
        self._run_dir = run_dir
        self._rng = np.random.default_rng(seed)
        self.rewards: list[float] = []
        self.lanes: list[int] = []
        self.counts: tuple[int, ...] = ()

    def played(self, convert: Callable[..., object], device: FakeDevice) -> Transcript:
        rng, device.holds_copies = self._rng, True
        with nothing_left(), FakeServer(self._run_dir, depth=16, slot_rows=8) as server:
            where = {"schema": SCHEMA, "run_dir": server.run_dir}
            with Collector.connect(server.name, lanes=LANES, linger=60.0, **where) as collector:  # type: ignore[arg-type]
                for call in range(20):
                    if rng.random() < 0.3:
                        collector.cut(int(rng.integers(LANES)))
                    n = LANES * int(rng.integers(1, 4))
                    rows: dict[str, object] = on_host(100 * call, n)
                    rows["reward"][rng.random(n) < 0.15] = np.nan  # type: ignore[index]
                    mask = convert(rng.random(n) < 0.8) if rng.random() < 0.5 else None
                    collector.write({name: convert(array) for name, array in rows.items()}, mask=mask)
                    if rng.random() < 0.1:
                        device.complete()
                device.holds_copies = False
                device.complete()
                collector.flush()
                statistics = collector.statistics()
            self.counts = (statistics.rows_written, statistics.rows_masked, statistics.rows_rejected, statistics.rows_committed)
            self.rewards = server.rows("reward").tolist()
            for taken in server.taken:
                whole = np.resize(np.arange(LANES, dtype=np.int32), taken.message.rows).tobytes()
                self.lanes += np.frombuffer(taken.message.lanes or whole, np.int32).tolist()
        return self


def test_lost_server_is_left_only_after_the_copies_into_its_slots(server: FakeServer, attach: Attach, device: FakeDevice) -> None:
    collector = attach()
    device.holds_copies = True
    collector.write(on_gpu(0, 16))
    server.restart()
    device.holds_copies = False
    collector.write(on_gpu(16, 16))
    with pytest.raises(ServerGone) as gone:
        collector.flush()
    assert gone.value.details["rows_lost"] in (16, 32)  # 32: the second write came before the word of the restart
    collector.write(on_gpu(32, 2))
    collector.flush()
    assert server.rows("reward")[-2:].tolist() == [32, 33]
    assert len(device.pinned) == 1


def test_rows_of_a_lost_server_that_passes_them_on_go_to_the_next_one_once_the_gpu_has_copied_them(
    server: FakeServer, attach: Attach, device: FakeDevice
) -> None:
    server.resumes = server.holds_credits = True
    server.depth = 3
    collector = attach()
    collector.write(on_gpu(0, 16))
    device.holds_copies = True
    collector.write(on_gpu(16, 24), mask=torch.arange(24) % 4 != 0)  # a full slot and a part of the next
    server.restart()
    server.hold_no_more()
    device.holds_copies = False
    collector.write(on_gpu(40, 8))
    collector.flush()
    kept = {taken.message.origin_number: taken for taken in server.taken}
    rewards = np.concatenate([SCHEMA["reward"].view(kept[number].rows) for number in sorted(kept)])
    assert rewards.tolist() == [*range(16), *(16 + i for i in range(24) if i % 4), *range(40, 48)]
    statistics = collector.statistics()
    assert (statistics.rows_committed, statistics.rows_masked, statistics.rows_lost) == (42, 6, 0)


def test_failed_device_is_named_and_the_collector_can_be_closed(
    server: FakeServer, attach: Attach, device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    collector = attach()
    device.has_failed = True
    with pytest.raises(DeviceError, match="unspecified launch failure"):
        collector.write(on_gpu(0, 16))
    with pytest.raises(DeviceError):
        collector.flush()
    with pytest.raises(DeviceError):
        collector.close()
    collector.close()
    assert server.of(Publish) == []
    assert len(server.of(Bye)) == 1
    assert caplog.messages == [
        f"collector {collector.name} ends with rows not committed: 16 never published: lost; flush() before close() tells of each loss"
    ]
    assert collector.statistics().rows_lost == 16


def test_rows_whose_copies_end_too_late_for_close_are_lost_and_told_so(
    server: FakeServer, attach: Attach, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay_server_client.collector._CLOSE_WAIT_S", 0.05)
    collector = attach()
    device.holds_copies = True
    collector.write(on_gpu(0, 16))
    with pytest.raises(ReplayTimeout, match="closed with rows not committed: 16 never published: lost; published rows are not"):
        collector.close()
    found = collector.statistics()
    assert (found.rows_written, found.rows_in_flight, found.rows_lost) == (16, 0, 16)
    assert server.of(Publish) == []


def test_wrong_fields_are_refused_by_name_and_change_nothing(server: FakeServer, attach: Attach) -> None:
    schema = Schema.of(reward="float32", obs=("float32", 3), step=Field("int32", cast=True))
    collector = attach(schema)
    good = on_gpu(0, 4) | {"step": torch.zeros(4, dtype=torch.int32)}
    wrong: list[tuple[Rows, str]] = [
        ({"reward": torch.zeros(4, dtype=torch.float64)}, r"'reward': dtype float64, must be float32"),
        ({"step": torch.zeros(4, dtype=torch.int64)}, "'step': int64 can't be checked"),
        ({"obs": torch.zeros(4, 2)}, r"'obs': shape \(4, 2\), must be \(4, 3\)"),
        ({"obs": torch.zeros(2, 3)}, "'obs': 2 rows, field 'reward' has 4"),
        ({"obs": torch.zeros(4, 3, device="meta")}, "'obs': a tensor on meta"),
        ({"obs": "text"}, "'obs': a str"),
        ({"obs": np.zeros((4, 3), "S1")}, "'obs': dtype"),
        ({"other": torch.zeros(4)}, "'other' is not in the schema"),
        ({"reward": torch.zeros(3)}, "no whole steps of 2 lanes"),
    ]
    for bad, words in wrong:
        with pytest.raises(RowsRejected, match=words):
            collector.write(good | bad)
    with pytest.raises(RowsRejected, match="go together"):
        collector.write(good, final_mask=torch.ones(4, dtype=torch.bool))
    with pytest.raises(RowsRejected, match=r"mask: float32\[4\], must be bool\[4\]"):
        collector.write(good, mask=torch.ones(4))
    with pytest.raises(RowsRejected, match=r"final field 'obs': shape \(2, 3\)"):
        collector.write(good, final_mask=torch.ones(4, dtype=torch.bool), final={"obs": torch.zeros(2, 3)})
    assert collector.statistics().rows_written == 0
    collector.write(good)
    assert collector.flush() == 4


def test_rows_of_the_device_are_stamped_and_their_episodes_added_up(server: FakeServer, attach: Attach) -> None:
    schema = Schema.of(policy_version="int32", reward="float32", terminated="bool")
    collector = attach(schema)
    collector.policy_version = 5
    ends = torch.tensor([False, True, True, False])
    collector.write({"reward": torch.tensor([1.0, 2.0, 3.0, 4.0]), "terminated": ends})
    collector.policy_version = 6
    collector.write({"reward": torch.tensor([5.0, 6.0]), "terminated": ends[:2]}, mask=torch.tensor([False, True]))
    assert collector.flush() == 5
    message = server.taken[0].message
    assert unpack_versions(message.versions) == [(5, 4), (6, 1)]
    assert unpack_episodes(message.episodes).last == [(2, 1), (4, 2), (10, 2)]
