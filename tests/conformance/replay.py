"""What the whole system promises wherever the ring and the batches lie: subclass, give it a ``storage`` fixture.

A real server, a real collector and a real learner each time; the learner is the test's own process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from replay_server_client import Collector, InvalidRequest, Learner, ReplayTimeout, Schema
from replay_server_protocol.schema import DTYPES
from support.draws import slow_draws
from support.processes import Children
from support.raw_client import RawCollector
from support.reports import assert_conserved, report_of, wait_report
from support.servers import ServerProcess, spawn_server

Start = Callable[..., ServerProcess]

MARKS = Schema.of(mark="int64")
CHUNKS = Schema.of(mark="int64", chunk=("int32", 100))
PARTS = Schema.of(obs=("float32", 4), action=("float32", 2), reward="float32", done="bool", image=("uint8", (3, 5)))
EVERY = Schema.of(
    {
        **{f"{dtype}_scalar": dtype for dtype in DTYPES},
        **{f"{dtype}_array": (dtype, (3, 2)) for dtype in DTYPES},
        "camera": {"rgb": ("uint8", (3, 84, 84)), "depth": ("float16", (7, 5))},
    }
)
CHI_SQUARE_LIMIT = 148.23
"""99.9th percentile of chi-square with 99 degrees of freedom."""
CAPACITY = 37
TIMEOUT_S = 20.0
LATE_IN_A_ROW = 3


@dataclass(frozen=True)
class Storage:
    """Options of the server that decide where the ring lies, and the device of the learners' batches."""

    server: tuple[str, ...]
    device: str

    def start(self, start_server: Start, *options: str) -> ServerProcess:
        return start_server(*self.server, *options)

    def learner(self, server: ServerProcess, **options: Any) -> Learner:
        return Learner.connect(server.name, run_dir=server.run_dir, device=self.device, timeout=TIMEOUT_S, **options)


def attach(server: ServerProcess, schema: Schema, **options: Any) -> Collector:
    return Collector.connect(server.name, schema=schema, run_dir=server.run_dir, timeout=TIMEOUT_S, **options)


def marks(first: int, end: int) -> dict[str, npt.NDArray[np.int64]]:
    return {"mark": np.arange(first, end)}


def parts(n: int) -> dict[str, npt.NDArray[np.generic]]:
    rng = np.random.default_rng(n)
    return {
        "obs": rng.standard_normal((n, 4), np.float32),
        "action": rng.standard_normal((n, 2), np.float32),
        "reward": rng.standard_normal(n, np.float32),
        "done": rng.integers(0, 2, n).astype(np.bool_),
        "image": rng.integers(0, 256, (n, 3, 5), np.uint8),
    }


def random_bits(schema: Schema, rows: int, seed: int) -> dict[str, npt.NDArray[np.generic]]:
    """Any bits at all, NaNs and denormals among them; bools are 0 or 1."""
    rng = np.random.default_rng(seed)
    made: dict[str, npt.NDArray[np.generic]] = {}
    for field in schema:
        shape = (rows, *field.shape)
        if field.dtype == "bool":
            made[field.name] = rng.integers(0, 2, shape).astype(np.bool_)
        else:
            raw = rng.integers(0, 256, (rows, field.n_bytes), np.uint8)
            made[field.name] = raw.view(field.numpy_dtype).reshape(shape)
    return made


def bits(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    """``uint8[n, bytes of a value]``."""
    found: npt.NDArray[np.uint8] = values.cpu().contiguous().view(len(values), -1).view(torch.uint8).numpy()
    return found


def draws(learner: Learner, seq: int, batches: int = 5) -> list[tuple[list[int], list[int], list[int]]]:
    """Seqs, ring indices and marks of some batches."""
    found = []
    for _ in range(batches):
        batch = learner.sample(64, min_committed=seq)
        found.append((batch.seqs.tolist(), batch.indices.tolist(), batch["mark"].tolist()))
    return found


class ReplayPromises:
    """The suite."""

    # rows

    def test_every_dtype_comes_back_bit_exact_after_a_wrap(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, "--capacity", "100", "--slot-rows", "12", "--headroom", "24")
        rows = random_bits(EVERY, 150, seed=1)
        with attach(server, EVERY, lanes=3) as collector, storage.learner(server, prefetch=0) as learner:
            collector.write(rows)
            batch = learner.sample(100, min_committed=collector.flush())
            assert batch.window == (50, 150)
            seqs = batch.seqs.cpu().numpy()
            for field in EVERY:
                written = np.ascontiguousarray(rows[field.name][seqs]).view(np.uint8).reshape(100, -1)
                assert np.array_equal(bits(batch[field.name]), written), field.name
            assert {batch[field.name].dtype for field in EVERY} == {getattr(torch, dtype) for dtype in DTYPES}

    def test_batches_lie_on_the_learners_device_as_views_of_one_block(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, "--capacity", "1000", "--slot-rows", "16")
        rows = parts(64)
        with attach(server, PARTS) as collector, storage.learner(server) as learner:
            collector.write(rows)
            batch = learner.sample(32, min_committed=collector.flush())
            place = torch.device(storage.device).type
            assert {tensor.device.type for tensor in (*batch.fields.values(), batch.seqs, batch.indices, batch.weights)} == {place}
            assert tuple(batch.fields) == PARTS.names
            joined = batch.span("obs", "action", "reward")
            assert joined.untyped_storage().data_ptr() == batch["obs"].untyped_storage().data_ptr()
            assert torch.equal(joined, torch.cat([batch["obs"], batch["action"], batch["reward"][:, None]], 1))
            with pytest.raises(InvalidRequest, match="one dtype"):
                batch.span("reward", "done")
            compact = batch.compact("image")
            assert compact.is_contiguous()
            seqs = batch.seqs.cpu()
            assert torch.equal(compact.cpu(), torch.from_numpy(np.asarray(rows["image"]))[seqs])
            for name, written in rows.items():
                assert torch.equal(batch[name].cpu(), torch.from_numpy(np.asarray(written))[seqs])

    # the window

    @pytest.mark.parametrize("chunk", [5, 23])
    def test_exactly_the_newest_capacity_rows_can_be_sampled(self, storage: Storage, start_server: Start, chunk: int) -> None:
        server = storage.start(start_server, "--capacity", str(CAPACITY), "--slot-rows", "8", "--headroom", "16")
        written = 0
        with attach(server, MARKS) as collector, storage.learner(server, prefetch=0) as learner:
            for count in (1, CAPACITY - 1, CAPACITY, CAPACITY + 1, 2 * CAPACITY, 5 * CAPACITY + 11):
                while written < count:
                    n = min(chunk, count - written)
                    collector.write(marks(written, written + n))
                    written += n
                assert collector.flush() == count
                oldest, found = max(0, count - CAPACITY), set()
                for _ in range(20):
                    batch = learner.sample(min(count, CAPACITY), min_committed=count)
                    assert batch.window == (oldest, count)
                    assert torch.equal(batch["mark"], batch.seqs)
                    found |= set(batch.seqs.tolist())
                assert found == set(range(oldest, count)), "20 batches of the window's size miss a row once in 10^7 runs"
        assert_conserved(report_of(server))

    @pytest.mark.parametrize("capacity", [1, 2])
    def test_the_smallest_rings_keep_their_newest_rows(self, storage: Storage, start_server: Start, capacity: int) -> None:
        server = storage.start(start_server, "--capacity", str(capacity), "--slot-rows", "1", "--headroom", "1")
        with attach(server, MARKS) as collector, storage.learner(server, prefetch=0) as learner:
            for mark in range(7):
                collector.write(marks(mark, mark + 1))
                batch = learner.sample(capacity, min_committed=collector.flush())
                assert set(batch["mark"].tolist()) <= set(range(max(0, mark + 1 - capacity), mark + 1))

    def test_rows_are_whole_while_the_ring_wraps_under_the_learner(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, "--capacity", "1000", "--slot-rows", "16")
        written = 0
        with attach(server, CHUNKS) as collector, storage.learner(server) as learner:
            for _ in range(200):
                seqs = np.arange(written, written + 64)
                collector.write({"mark": seqs, "chunk": np.repeat(seqs[:, None], 100, 1).astype(np.int32)})
                written += 64
                batch = learner.sample(128)
                tail, committed = batch.window
                assert torch.equal(batch["mark"], batch.seqs)
                assert bool((batch["chunk"] == batch.seqs[:, None]).all())
                assert tail <= int(batch.seqs.min()) <= int(batch.seqs.max()) < committed <= written
            assert learner.statistics().late == 0

    def test_lock_step_sees_each_flush_and_the_newest_rows_alone_if_asked(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, "--capacity", "1000", "--slot-rows", "16")
        with attach(server, MARKS) as collector, storage.learner(server) as learner:
            for step in range(20):
                collector.write(marks(step * 10, step * 10 + 10))
                batch = learner.sample(40, min_committed=collector.flush(), max_age_rows=10)
                assert batch.window == (step * 10, step * 10 + 10)
                assert int(batch["mark"].min()) >= step * 10

    # the draw

    def test_uniform_draws_pass_a_chi_square_test(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, "--capacity", "100", "--slot-rows", "16")
        counts = np.zeros(100)
        with attach(server, MARKS) as collector, storage.learner(server, seed=7) as learner:
            collector.write(marks(0, 250))
            seq = collector.flush()
            for _ in range(500):
                batch = learner.sample(100, min_committed=seq)
                counts += np.bincount(batch["mark"].cpu().numpy() - 150, minlength=100)
        expected = counts.sum() / 100
        assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_LIMIT

    def test_equal_seeds_draw_the_rows_and_indices_of_the_cpu_ring(self, storage: Storage, start_server: Start) -> None:
        reference, server, other = (
            start_server(*options, "--capacity", "100", "--slot-rows", "16", "--seed", seed)
            for options, seed in (((), "3"), (storage.server, "3"), (storage.server, "4"))
        )
        found = {}
        for side, at, device, seed, name in (
            ("reference", reference, "cpu", 1, "a"),
            ("same", server, storage.device, 1, "a"),
            ("again", server, storage.device, 1, "a"),
            ("other learner seed", server, storage.device, 2, "a"),
            ("other learner name", server, storage.device, 1, "b"),
            ("other server seed", other, storage.device, 1, "a"),
        ):
            with attach(at, MARKS) as collector, Storage((), device).learner(at, seed=seed, name=name) as learner:
                if report_of(at)["ring"]["committed"] == 0:
                    collector.write(marks(0, 130))
                    collector.flush()
                found[side] = draws(learner, 130)
        assert found["reference"] == found["same"] == found["again"]
        assert len({tuple(seqs) for seqs, _, _ in found["reference"]}) == 5, "each request draws rows of its own"
        for side in ("other learner seed", "other learner name", "other server seed"):
            assert all(batch != again for batch, again in zip(found["reference"], found[side], strict=True)), side

    # order

    def test_rows_can_be_sampled_only_after_their_copy_is_complete(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, "--capacity", "1000", "--slot-rows", "16", "--debug-copy-delay", "0.4")
        with attach(server, MARKS) as collector, storage.learner(server, prefetch=0) as learner:
            collector.write(marks(0, 16))
            assert learner.sample(8, min_committed=collector.flush(), timeout=TIMEOUT_S).window == (0, 16)
            collector.write(marks(16, 32))
            written_s = time.monotonic()
            # While a host function holds the copy stream, the driver lets no other call through: that daemon can't say what is missing.
            with pytest.raises(ReplayTimeout, match=None if storage.server == ("--device", "cuda") else "16"):
                learner.sample(8, min_committed=32, timeout=0.05)
            batch = learner.sample(200, min_committed=32, timeout=TIMEOUT_S)
            assert time.monotonic() - written_s >= 0.35
            assert torch.equal(batch["mark"], batch.seqs)

    def test_a_slot_used_again_at_once_after_its_credit_spoils_no_row(self, storage: Storage, start_server: Start) -> None:
        delay_s, slot_rows, chunks = 0.1, 32, 12
        server = storage.start(start_server, "--capacity", "1000", "--slot-rows", str(slot_rows), "--debug-copy-delay", str(delay_s))
        with RawCollector(server.endpoints, CHUNKS) as collector, storage.learner(server) as learner:
            published_s: list[float] = []
            for chunk in range(chunks):
                if chunk >= 2:
                    collector.wait_credit(chunk - 1)
                    assert time.monotonic() - published_s[chunk - 2] >= delay_s, "the credit came before the copy was complete"
                first = chunk * slot_rows
                collector.fill(chunk % 2, "mark", np.arange(first, first + slot_rows))
                collector.fill(chunk % 2, "chunk", np.full((slot_rows, 100), chunk, np.int32))
                collector.publish(chunk + 1, chunk % 2, slot_rows)
                published_s.append(time.monotonic())
            collector.wait_credit(chunks)
            batch = learner.sample(1000, min_committed=chunks * slot_rows, timeout=TIMEOUT_S)
            assert torch.equal(batch["mark"], batch.seqs)
            assert bool((batch["chunk"] == (batch.seqs // slot_rows)[:, None]).all())

    def test_late_batches_are_never_handed_out_and_hold_the_ring_no_longer_than_their_lease(
        self, storage: Storage, start_server: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = storage.start(start_server, "--capacity", "64", "--slot-rows", "16", "--headroom", "16", "--lease", "0.2")
        with attach(server, MARKS) as collector, storage.learner(server, prefetch=0) as learner:
            collector.write(marks(0, 64))
            collector.flush()
            with monkeypatch.context() as slowed:
                slow_draws(slowed, 0.4)
                with pytest.raises(ReplayTimeout, match="lease lasts 200 ms"):
                    learner.sample(16, timeout=TIMEOUT_S)
            found = learner.statistics()
            assert (found.batches, found.late) == (0, LATE_IN_A_ROW)
            collector.write(marks(64, 256), timeout=TIMEOUT_S)
            batch = learner.sampler(32).sample(min_committed=collector.flush(), timeout=TIMEOUT_S)
            assert torch.equal(batch["mark"], batch.seqs)
            report = wait_report(server, lambda found: found["learners"][0]["open_leases"] == 0)
            assert report["counters"]["leases_revoked"] >= LATE_IN_A_ROW

    # batch buffers

    @pytest.mark.parametrize("prefetch", [0, 1, 3])
    def test_addresses_repeat_with_period_prefetch_plus_one(self, storage: Storage, start_server: Start, prefetch: int) -> None:
        server = storage.start(start_server, "--capacity", "1000", "--slot-rows", "16")
        period = prefetch + 1
        with attach(server, PARTS) as collector, storage.learner(server, prefetch=prefetch) as learner:
            collector.write(parts(64))
            seq, seen = collector.flush(), []
            for _ in range(3 * period + 1):
                batch = learner.sample(32, min_committed=seq)
                seen.append((batch.buffer, batch["reward"].data_ptr(), batch.compact("obs").data_ptr(), batch.seqs.data_ptr()))
            assert [buffer for buffer, *_ in seen] == [number % period for number in range(len(seen))]
            assert len(set(seen)) == period
            assert seen[period:] == seen[:-period]

    def test_a_lent_batch_stays_as_it_is_while_the_ring_wraps(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, "--capacity", "100", "--slot-rows", "16")
        with attach(server, MARKS) as collector, storage.learner(server) as learner:
            collector.write(marks(0, 100))
            batch = learner.sample(64, min_committed=collector.flush())
            mark, seen = batch["mark"], batch["mark"].clone()
            collector.write(marks(100, 1000))
            collector.flush()
            learner.sample(8)
            assert torch.equal(mark, seen)
            learner.sample(64)
            with pytest.raises(InvalidRequest, match="ended with the next sample"):
                batch["mark"]

    # clients and servers

    def test_a_living_learner_goes_on_with_the_next_server(self, storage: Storage, children: Children, crash_dir: Path) -> None:
        options = (*storage.server, "--capacity", "1000", "--slot-rows", "16")
        server = spawn_server(children, crash_dir, *options)
        with storage.learner(server) as learner:
            with attach(server, MARKS) as collector:
                collector.write(marks(0, 100))
                batch = learner.sample(16, min_committed=collector.flush())
            mark, seen = batch["mark"], batch["mark"].clone()
            addresses = {mark.data_ptr(), learner.sample(16)["mark"].data_ptr()}
            server.kill()
            server = spawn_server(children, crash_dir, *options, name=server.name)
            with attach(server, MARKS) as collector:
                collector.write(marks(5000, 5050))
                collector.flush()
            found = [learner.sample(16, timeout=TIMEOUT_S)["mark"] for _ in range(4)]
            assert {tensor.data_ptr() for tensor in found} == addresses
            assert min(int(tensor.min()) for tensor in found[2:]) >= 5000
            assert learner.statistics().generations == 2
            assert len(seen) == 16
        assert server.stop() == 0

    def test_a_server_that_stops_lets_an_idle_learner_go_and_leaves_nothing(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, "--capacity", "1000", "--slot-rows", "16")
        with storage.learner(server) as learner:
            with attach(server, MARKS) as collector:
                collector.write(marks(0, 100))
                learner.sample(16, min_committed=collector.flush())
            before_s = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - before_s < 1.9, "the learner detaches before the grace of 2 s is over"
            assert list(learner.batches(16)) == []

    def test_two_learners_of_one_process_share_the_ring_and_each_ends_alone(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, "--capacity", "1000", "--slot-rows", "16")
        with attach(server, MARKS) as collector, storage.learner(server, name="stays") as stays:
            collector.write(marks(0, 200))
            seq = collector.flush()
            for _ in range(3):
                with storage.learner(server, name="goes") as goes:
                    batch, other = goes.sample(32, min_committed=seq), stays.sample(32, min_committed=seq)
                    assert not torch.equal(batch.seqs, other.seqs)
                    assert torch.equal(batch["mark"], batch.seqs)
                other = stays.sample(32, min_committed=seq)
                assert torch.equal(other["mark"], other.seqs)

    def test_arrays_posted_from_the_device_reach_the_collector(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, "--capacity", "1000", "--slot-rows", "16")
        weight = torch.arange(6.0, device=storage.device).view(2, 3)
        with attach(server, MARKS) as collector, storage.learner(server) as learner:
            assert learner.post("policy", {"w": weight}) == 1
            assert learner.post("policy", {"w": weight.T, "b": weight.to(torch.bfloat16)}) == 2
            mail = collector.latest("policy")
            assert mail is not None
            version, arrays = mail
            assert version == 2
            assert np.array_equal(arrays["w"], weight.T.cpu().numpy())
            assert arrays["b"].tobytes() == bits(weight.to(torch.bfloat16)).tobytes()
