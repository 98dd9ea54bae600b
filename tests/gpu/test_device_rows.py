"""CUDA tensors are written like arrays of the host: the same rows in the same order, without the caller waiting for the GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from replay_server_client import Collector, Learner, RowsRejected, Schema
from support.servers import ServerProcess

pytestmark = pytest.mark.gpu

SCHEMA = Schema.of(reward="float32", obs=("float32", 107), step="int64", done="bool", half=("bfloat16", 3), pixels=("uint8", (3, 5)))
LANES = 64
CAPACITY = 20_000
LONG_S = 0.2
_CYCLES_PER_S = 2e9
"""More than the clock of the GPUs at hand has, so that a kernel spins no shorter than it is told to."""

Array = npt.NDArray[Any]
Attach = Callable[..., Collector]


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    options = ("--device", "cuda", "--capacity", str(CAPACITY), "--slot-rows", "512", "--depth", "2")
    return start_server(*options, "--columns", "link", "--moments", "reward")


@pytest.fixture
def attach(server: ServerProcess) -> Iterator[Attach]:
    attached: list[Collector] = []

    def connect(**options: Any) -> Collector:
        wanted: dict[str, Any] = {"schema": SCHEMA, "lanes": LANES, "timeout": 20.0} | options
        attached.append(Collector.connect(server.name, run_dir=server.run_dir, **wanted))
        return attached[-1]

    yield connect
    for collector in attached:
        collector.close()


def on_host(first: int, n: int) -> dict[str, Array]:
    """Rows that all derive from ``reward``, which counts."""
    reward = np.arange(first, first + n, dtype=np.float32)
    rng = np.random.default_rng(first)
    return {
        "reward": reward,
        "obs": rng.standard_normal((n, 107), dtype=np.float32),
        "step": np.arange(first, first + n) * 2**33,
        "done": rng.random(n) < 0.3,
        "half": rng.integers(0, 2**16, (n, 3)).astype(np.uint16) & np.uint16(0xBFFF),  # no NaN: its bits survive comparison
        "pixels": rng.integers(0, 256, (n, 3, 5)).astype(np.uint8),
    }


def on_gpu(rows: dict[str, Array]) -> dict[str, Any]:
    import torch

    tensors: dict[str, Any] = {name: torch.from_numpy(array).cuda() for name, array in rows.items() if name != "half"}
    tensors["half"] = torch.from_numpy(rows["half"].view(np.int16)).cuda().view(torch.bfloat16)
    return tensors


def ring_rows(server: ServerProcess, n: int = 16_384, draws: int = 4) -> dict[int, dict[str, bytes]]:
    """What a learner sees, by seq: every field's bytes. The draws find each of a few thousand rows but for a chance below 1e-4."""
    import torch

    found: dict[int, dict[str, bytes]] = {}
    with Learner.connect(server.name, device="cuda", run_dir=server.run_dir, timeout=20.0, prefetch=0) as learner:
        for _ in range(draws):
            batch = learner.sample(n, timeout=20.0)
            seqs = batch.seqs.cpu().numpy()
            fields = {name: batch.compact(name).view(n, -1).view(torch.uint8).cpu().numpy() for name in SCHEMA.names}
            _, first = np.unique(seqs, return_index=True)
            found |= {int(seqs[i]): {name: column[i].tobytes() for name, column in fields.items()} for i in first}
    return found


def bytes_of(rows: dict[str, Array], index: int) -> dict[str, bytes]:
    return {name: array[index].tobytes() for name, array in rows.items()}


def hold(seconds: float) -> None:
    """Queues a kernel that spins so long on the current stream."""
    import torch

    torch.cuda._sleep(round(seconds * _CYCLES_PER_S))


def test_rows_arrive_bit_for_bit_like_those_of_the_host(server: ServerProcess, attach: Attach) -> None:
    rows = on_host(0, 2048)
    collector = attach()
    collector.write(on_gpu(rows))
    assert collector.flush() == 2048
    found = ring_rows(server)
    assert len(found) == 2048
    for seq, row in found.items():
        assert row == bytes_of(rows, seq)


def test_rows_keep_their_order_among_host_rows_and_over_many_wraps(server: ServerProcess, attach: Attach) -> None:
    collector = attach()
    for call in range(3 * CAPACITY // 320):
        rows = on_host(320 * call, 320)
        collector.write(on_gpu(rows) if call % 3 else rows)
    committed = collector.flush(timeout=20.0)
    assert committed == 320 * (3 * CAPACITY // 320)
    for seq, row in ring_rows(server, 4096).items():
        assert row["reward"] == np.float32(seq).tobytes()
        assert row["step"] == np.int64(seq * 2**33).tobytes()


@pytest.mark.parametrize("masks_on_gpu", [False, True])
def test_masks_and_finals(server: ServerProcess, attach: Attach, masks_on_gpu: bool) -> None:
    import torch

    rows = on_host(0, 640)
    rng = np.random.default_rng(3)
    mask, ends, final = rng.random(640) < 0.7, rng.random(640) < 0.2, on_host(9000, 640)["obs"]
    place: Callable[[Array], Any] = (lambda array: torch.from_numpy(array).cuda()) if masks_on_gpu else np.asarray
    collector = attach()
    collector.write(on_gpu(rows), mask=place(mask), final_mask=place(ends), final={"obs": place(final)})
    assert collector.flush() == int(mask.sum())
    rows["obs"][ends] = final[ends]
    kept = np.flatnonzero(mask)
    for seq, row in ring_rows(server, 16_384).items():
        assert row == bytes_of(rows, int(kept[seq]))


def test_non_finite_rewards_are_rejected_and_counted(server: ServerProcess, attach: Attach) -> None:
    rows = on_host(0, 512)
    rows["reward"][[5, 70, 511]] = [np.nan, np.inf, -np.inf]
    collector = attach()
    collector.write(on_gpu(rows))
    assert collector.flush() == 509
    assert collector.statistics().rows_rejected == 3
    with Learner.connect(server.name, device="cuda", run_dir=server.run_dir, timeout=20.0) as learner:
        learner.wait_ready(timeout=20.0)
        assert learner.moments("reward")["count"] == 509


def test_packing_follows_the_callers_stream(server: ServerProcess, attach: Attach) -> None:
    """The rows are computed behind a long kernel on a side stream: a copy that did not wait for it would take the old ones."""
    import torch

    rows = on_host(0, 512)
    collector = attach()
    collector.write(on_gpu(on_host(0, 512)))  # sets up
    collector.flush()
    stream = torch.cuda.Stream()
    late = {name: torch.zeros_like(tensor) for name, tensor in on_gpu(rows).items()}
    new = on_gpu(rows)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        hold(LONG_S)
        for name, tensor in late.items():
            tensor.copy_(new[name])
        collector.write(late)
        for tensor in late.values():
            tensor.zero_()  # ordered behind the packing, so it takes nothing back
    collector.flush(timeout=20.0)
    for seq, row in ring_rows(server, 16_384).items():
        assert row == bytes_of(rows, seq % 512)


def test_write_waits_for_no_work_of_the_gpu(server: ServerProcess, attach: Attach) -> None:
    import torch

    collector = attach()
    mask, final = torch.ones(512, dtype=torch.bool, device="cuda"), on_host(7, 512)["obs"]
    rows = on_gpu(on_host(0, 512))

    def write() -> None:
        collector.write(rows, mask=mask, final_mask=mask, final={"obs": final})

    hold(LONG_S)  # so that the first two writes find no memory that the one before has given back, and set up all there is to
    write()
    write()
    collector.flush(timeout=20.0)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    hold(LONG_S)
    done.record()
    before = time.perf_counter()
    write()
    write()
    took_s = time.perf_counter() - before
    assert not done.query(), "the kernel was over too soon to show anything"
    assert took_s < LONG_S / 4
    assert collector.statistics().rows_in_flight == 1024
    assert collector.flush(timeout=20.0) == 2048


def test_a_slot_is_published_by_the_next_call_that_finds_its_copy_done(server: ServerProcess, attach: Attach) -> None:
    import torch

    collector = attach(linger=60.0)
    rows = on_gpu(on_host(0, 512))
    collector.write(rows)
    torch.cuda.synchronize()
    collector.write({name: tensor[:LANES] for name, tensor in rows.items()})
    assert collector.statistics().publishes == 1
    assert collector.flush() == 512 + LANES


def test_rows_of_another_gpu_are_refused(attach: Attach) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    collector = attach()
    rows = on_gpu(on_host(0, LANES))
    collector.write(rows)
    with pytest.raises(RowsRejected, match="'obs': a tensor on cuda:1"):
        collector.write(rows | {"obs": rows["obs"].to("cuda:1")})


def test_closing_lets_go_of_pinned_memory_so_that_it_can_be_pinned_again(server: ServerProcess, attach: Attach) -> None:
    rows = on_gpu(on_host(0, 512))
    for number in range(20):
        collector = attach(name=f"again-{number}")
        collector.write(rows)
        collector.close()


def test_a_killed_server_costs_the_rows_in_flight_and_no_more(children: Any, crash_dir: Any) -> None:
    from replay_server_client import ServerGone
    from support.servers import spawn_server

    options = ("--device", "cuda", "--capacity", str(CAPACITY), "--slot-rows", "512")
    first = spawn_server(children, crash_dir, *options, name="gpu")
    rows = on_gpu(on_host(0, 512))
    with Collector.connect("gpu", schema=SCHEMA, lanes=LANES, run_dir=crash_dir, timeout=30.0) as collector:
        collector.write(rows)
        collector.flush()
        os.kill(first.pid, signal.SIGSTOP)  # so that it commits nothing more
        collector.write(rows)
        first.kill()
        second = spawn_server(children, crash_dir, *options, name="gpu")
        collector.write(rows)
        with pytest.raises(ServerGone) as gone:
            collector.flush(timeout=20.0)
        assert gone.value.details["rows_lost"] in (512, 1024)
        collector.write(rows)
        collector.flush(timeout=20.0)
        statistics = collector.statistics()
        assert statistics.rows_written == statistics.rows_committed + statistics.rows_lost
    assert second.stop() == 0
