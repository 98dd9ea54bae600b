"""What every way to sample promises wherever the ring and the batches lie: subclass, give it a ``storage`` fixture.

A real server, real collectors and real learners each time, against references that are slow and obvious.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from conformance.replay import Start, Storage, attach
from replay_server_client import Batch, Field, InvalidRequest, Learner, MixedSampler, Schema, SchemaMismatch
from support.freeze import frozen
from support.lanes import GAMMA, LANES, Lanes, check_n_step, check_sequences
from support.processes import Children
from support.reports import report_of, wait_report
from support.servers import spawn_server
from support.written_states import MUTABLE, STATES, Priorities, as_written, assert_fields, newer, of_mark, states

COLUMNS = ("--columns", "link,priority")
SMALL = ("--capacity", "64", "--slot-rows", "16")
TIMEOUT_S = 20.0
MARKS = Schema.of(mark="int64")
CHI_SQUARE_LIMIT = 148.23
"""99.9th percentile of chi-square with 99 degrees of freedom."""


def marks(first: int, end: int) -> dict[str, npt.NDArray[np.int64]]:
    return {"mark": np.arange(first, end)}


def chi_square(draw: Callable[[], Batch], batches: int, mass: npt.NDArray[np.float64], first: int) -> float:
    """Of the marks drawn against ``mass`` of the 100 rows from ``first``."""
    counts = np.zeros(100)
    for _ in range(batches):
        counts += np.bincount(draw()["mark"].cpu().numpy() - first, minlength=100)
    expected = counts.sum() * mass / mass.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def write_back_for_ever(name: str, run_dir: str, device: str) -> None:
    """Gives priorities and hidden states that follow from the mark, until it is killed."""
    from replay_server_client import Learner
    from support.written_states import newer, of_mark

    with Learner.connect(name, device=device, run_dir=run_dir, name="writer") as learner:
        for number in range(10**9):
            batch = learner.sample(32, by="priority", alpha=1.0, timeout=30)
            learner.update_priorities(batch, of_mark(batch["mark"]))
            learner.update(batch, newer(batch, 1))
            if number % 50 == 10:
                print(f"wrote {number}", flush=True)


class SamplerPromises:
    """The suite."""

    # along links

    @pytest.mark.parametrize("slot_rows", [4, 24], ids=["slots of one step", "slots of many steps"])
    def test_n_step_rows_and_sequences_are_those_of_the_slow_reference(self, storage: Storage, start_server: Start, slot_rows: int) -> None:
        server = storage.start(start_server, "--capacity", "60", "--slot-rows", str(slot_rows), *COLUMNS)
        with (
            attach(server, LANES, lanes=4, name="a") as a,
            attach(server, LANES, lanes=3, name="b") as b,
            storage.learner(server, prefetch=0) as learner,
        ):
            lanes = Lanes((a, b), slot_rows, random.Random(slot_rows))
            while len(lanes.rows) < 60:
                lanes.write()
            while len(lanes.rows) < 400:
                committed = lanes.write(p_end=random.Random(len(lanes.rows)).choice((0.0, 0.1, 0.6)))
                fresh: dict[str, Any] = {"min_committed": committed, "timeout": TIMEOUT_S}
                for n_step in (1, 3, 5):
                    check_n_step(lanes, learner.sample(24, n_step=n_step, gamma=GAMMA, **fresh), n_step)
                by_priority = learner.sample(24, n_step=3, gamma=GAMMA, by="priority", **fresh)
                check_n_step(lanes, by_priority, 3)
                learner.update_priorities(by_priority, by_priority["reward"].abs())
                for length, stride, burn_in, crosses in ((5, 1, 2, False), (4, 2, 0, True), (6, 1, 1, True), (3, 3, 0, False)):
                    kind = {"length": length, "stride": stride, "burn_in": burn_in, "crosses_episodes": crosses}
                    check_sequences(lanes, learner.sequences(10, **kind, **fresh), length, stride, burn_in, crosses=crosses)  # type: ignore[arg-type]

    def test_results_of_the_other_kind_are_refused_by_name(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, *SMALL, *COLUMNS)
        with attach(server, LANES, lanes=2) as collector, storage.learner(server) as learner:
            lanes = Lanes([collector], 16, random.Random(0))
            lanes.write()
            with pytest.raises(InvalidRequest, match=r"no 'mask'.*sequences\(\)"):
                _ = learner.sample(4).mask
            with pytest.raises(InvalidRequest, match=r"no 'bootstrap'.*sample\(\)"):
                _ = learner.sequences(4, length=3).bootstrap

    # priorities

    def test_draws_follow_priorities_and_age(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, "--capacity", "100", "--slot-rows", "16", *COLUMNS)
        with attach(server, MARKS) as collector, storage.learner(server, prefetch=0) as learner:
            collector.write(marks(0, 150))
            fresh: dict[str, Any] = {"min_committed": collector.flush(), "timeout": TIMEOUT_S}
            model = Priorities()

            def draw(alpha: float, beta: float) -> Batch:
                batch = learner.sample(100, by="priority", alpha=alpha, beta=beta, **fresh)
                model.check_weights(batch, alpha, beta)
                model.update(learner, batch, of_mark(batch["mark"]))
                return batch

            while len(model.given) < 100:
                draw(1.0, 0.5)
            p = model.of(range(50, 150))
            assert chi_square(lambda: draw(1.0, 0.5), 150, p, 50) < CHI_SQUARE_LIMIT
            assert chi_square(lambda: draw(2.0, 1.0), 150, p**2, 50) < CHI_SQUARE_LIMIT
            assert draw(0.0, 1.0).weights.unique().tolist() == [1.0]
            collector.write(marks(150, 170))
            fresh["min_committed"] = collector.flush()
            new = [int((learner.sample(100, by="priority", alpha=1.0, beta=0.5, **fresh)["mark"] >= 150).sum()) for _ in range(60)]
            share = 20 * 5 / model.of(range(70, 170)).sum()
            assert sum(new) / 6000 == pytest.approx(share, abs=4 * (share * (1 - share) / 6000) ** 0.5), "new rows count as the largest"
            model.check_weights(learner.sample(100, by="priority", alpha=1.0, beta=0.5, **fresh), 1.0, 0.5)
            decay = 0.5 ** (np.arange(99, -1, -1) / 30)
            by_age = chi_square(lambda: learner.sample(100, half_life_rows=30, **fresh), 100, decay, 70)
            assert by_age < CHI_SQUARE_LIMIT
            p = model.of(range(70, 170))
            both = {"by": "priority", "half_life_rows": 30.0, "alpha": 1.0, **fresh}
            assert chi_square(lambda: learner.sample(100, **both), 100, decay * p, 70) < CHI_SQUARE_LIMIT

    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_an_update_acts_with_the_request_that_uses_its_buffer_again(self, storage: Storage, start_server: Start, prefetch: int) -> None:
        server = storage.start(start_server, *SMALL, *COLUMNS)
        with attach(server, MARKS) as collector, storage.learner(server, prefetch=prefetch) as learner:
            collector.write(marks(0, 4))
            collector.flush()
            batch = learner.sample(64, by="priority")
            assert set(batch["mark"].tolist()) == {0, 1, 2, 3}
            if prefetch:
                wait_report(server, lambda found: found["learners"][0]["batches"] == 1 + prefetch)
            learner.update_priorities(batch, (batch["mark"] == 2).float())
            before = [set(learner.sample(64, by="priority")["mark"].tolist()) for _ in range(prefetch)]
            assert before == [{0, 1, 2, 3}] * prefetch, "what was made ready ahead was drawn before"
            assert set(learner.sample(64, by="priority")["mark"].tolist()) == {2}

    def test_writes_of_rows_that_have_left_the_window_are_counted_and_reach_no_other_row(
        self, storage: Storage, start_server: Start
    ) -> None:
        server = storage.start(start_server, "--capacity", "32", "--slot-rows", "16", "--headroom", "16", *COLUMNS)
        with attach(server, STATES) as collector, storage.learner(server, prefetch=0) as learner:
            written = 0
            for turn in range(4):
                collector.write(states(written, written + 48))
                written += 48
                batch = learner.sample(24, by="priority", min_committed=collector.flush(), beta=1.0)
                assert batch.weights.unique().tolist() == [1.0], "no row here was ever given a priority"
                assert_fields(batch, as_written(batch))
                assert _counts(learner, batch)[0] == 48 * turn
                learner.update_priorities(batch, torch.full((24,), 9.0 + turn))
                learner.update(batch, newer(batch, 1))

    def test_what_is_no_priority_is_told_once_and_changes_nothing(self, storage: Storage, start_server: Start) -> None:
        """D11: a NaN priority is always refused, and the sampler keeps working."""
        server = storage.start(start_server, *SMALL, *COLUMNS)
        bad = torch.tensor([float("nan"), float("inf"), -1.0, -float("inf")], device=storage.device)
        with attach(server, MARKS) as collector, storage.learner(server, prefetch=0) as learner:
            collector.write(marks(0, 8))
            collector.flush()
            batch, model = learner.sample(64, by="priority", alpha=1.0, beta=1.0), Priorities()
            model.update(learner, batch, of_mark(batch["mark"]))
            batch = learner.sample(64, by="priority")
            learner.update_priorities(batch, bad.repeat(16))
            with pytest.warns(RuntimeWarning, match="64 values that are not finite"):
                batch = _told(learner, batch, strict=False)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                model.check_weights(learner.sample(64, by="priority"), 1.0, 1.0)
            batch = learner.sample(64, by="priority", strict=True)
            learner.update_priorities(batch, bad.repeat(16))
            with pytest.raises(InvalidRequest, match="64 values that are not finite"):
                _told(learner, batch, strict=True)
            model.check_weights(learner.sample(64, by="priority", strict=True, alpha=1.0, beta=1.0), 1.0, 1.0)
            assert learner.statistics().refused_priorities == 128

    def test_nothing_but_zero_priorities_draws_uniformly_and_is_counted(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, *SMALL, *COLUMNS)
        with attach(server, MARKS) as collector, storage.learner(server, prefetch=0) as learner:
            collector.write(marks(0, 4))
            collector.flush()
            learner.update_priorities(learner.sample(64, by="priority"), [0] * 64)
            before = learner.statistics().all_zero_draws
            batch = learner.sample(64, by="priority", beta=1.0)
            assert set(batch["mark"].tolist()) == {0, 1, 2, 3}
            assert batch.weights.unique().tolist() == [1.0]
            assert _counts(learner, batch)[2] == before + 1

    def test_writes_to_the_wrong_batch_are_refused_by_name(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, *SMALL, *COLUMNS)
        with attach(server, STATES) as collector, storage.learner(server) as learner, storage.learner(server, name="other") as other:
            collector.write(states(0, 32))
            seq = collector.flush()
            expired = learner.sample(8, by="priority")
            batch, ones = learner.sample(8, by="priority"), torch.ones(8)
            for user, target, named in ((learner, expired, "ended with the next sample"), (other, batch, "another learner's")):
                with pytest.raises(InvalidRequest, match=named):
                    user.update_priorities(target, ones)
                with pytest.raises(InvalidRequest, match=named):
                    user.update(target, {"hidden": batch["hidden"]})
            with pytest.raises(InvalidRequest, match="not drawn by priority"):
                learner.update_priorities(learner.sample(8), ones)
            for wrong in (torch.ones(7), torch.ones(8, 2), [1.0]):
                with pytest.raises(InvalidRequest, match="one for each of the batch's 8 draws"):
                    learner.update_priorities(batch, wrong)
            hidden = batch["hidden"]
            wrong_values: list[tuple[Any, str]] = [
                ({"nothing": hidden}, "'nothing' is not mutable"),
                ({"fixed": batch["fixed"]}, "'fixed' is not mutable"),
                ({"hidden": hidden[:4]}, "'hidden'.*4, 3.*8, 3"),
                ({"hidden": hidden.double()}, "'hidden'.*float64.*float32"),
                ({"hidden": hidden.tolist()}, "'hidden'.*is no tensor"),
                ({"count": hidden, "hidden": hidden}, "'count'"),
            ]
            for values, named in wrong_values:
                with pytest.raises(InvalidRequest, match=named):
                    learner.update(batch, values)
            later = learner.sample(32, min_committed=seq)
            assert_fields(later, as_written(later))
            assert learner.statistics().stale_writes == 0

    def test_two_learners_that_write_at_once_leave_whole_records(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, *SMALL, *COLUMNS)
        with attach(server, STATES) as collector, storage.learner(server, name="a") as a, storage.learner(server, name="b") as b:
            collector.write(states(0, 64))
            collector.flush()
            failed: list[Exception] = []

            def work(learner: Learner, by: int) -> None:
                try:
                    for _ in range(100):
                        batch = learner.sample(48, by="priority", alpha=1.0, beta=1.0, timeout=TIMEOUT_S)
                        learner.update_priorities(batch, of_mark(batch["mark"]))
                        learner.update(batch, newer(batch, by))
                except Exception as error:  # noqa: BLE001 - told by the test's thread
                    failed.append(error)

            threads = [threading.Thread(target=work, args=pair) for pair in ((a, 1), (b, 2))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failed
            model = Priorities()
            model.given = {mark: float(1 + mark % 5) for mark in range(64)}
            for _ in range(6):  # what is pending or was made ready ahead comes first
                batch = a.sample(48, by="priority", timeout=TIMEOUT_S)
            model.check_weights(batch, 1.0, 1.0)
            one, two = newer(batch, 1), newer(batch, 2)
            for name in MUTABLE:
                assert bool(((batch[name] == one[name]) | (batch[name] == two[name])).all()), name
            assert a.statistics().stale_writes == b.statistics().stale_writes == 0

    def test_learners_stopped_and_killed_between_their_writes_spoil_no_row(
        self, storage: Storage, start_server: Start, children: Children
    ) -> None:
        server = storage.start(start_server, *SMALL, "--headroom", "16", "--lease", "0.2", *COLUMNS)
        with attach(server, STATES) as collector, storage.learner(server, prefetch=0) as learner:
            collector.write(states(0, 64))
            collector.flush()
            child = children.run(write_back_for_ever, server.name, str(server.run_dir), storage.device)
            child.wait_for("wrote 10")
            with frozen(child):
                collector.write(states(64, 200), timeout=TIMEOUT_S)
                fresh: dict[str, Any] = {"min_committed": collector.flush(TIMEOUT_S), "timeout": TIMEOUT_S}
                seen = child.output.count("wrote")
                _check_records(learner, fresh)
            child.wait_for(f"wrote {50 * (seen + 1) + 10}")
            _check_records(learner, fresh)
            child.kill()
            _check_records(learner, fresh)
            collector.write(states(200, 400), timeout=TIMEOUT_S)
            fresh["min_committed"] = collector.flush(TIMEOUT_S)
            batch = learner.sample(64, by="priority", beta=1.0, **fresh)
            assert batch.weights.unique().tolist() == [1.0], "a late write gave a new row an old row's priority"
            assert_fields(batch, as_written(batch))
            wait_report(server, lambda found: len(found["learners"]) == 1)

    def test_nothing_written_about_a_dead_servers_rows_reaches_the_next_ring(
        self, storage: Storage, children: Children, crash_dir: Path
    ) -> None:
        """And no window holds rows of both."""
        options = (*storage.server, *SMALL, *COLUMNS)
        server = spawn_server(children, crash_dir, *options)
        with storage.learner(server) as learner:
            with attach(server, STATES) as collector:
                collector.write(states(0, 64))
                collector.flush()
                for _ in range(2):
                    batch = learner.sample(48, by="priority")
                    learner.update_priorities(batch, of_mark(batch["mark"]))
                    learner.update(batch, newer(batch, 1))
                sequences = learner.sequences(8, length=4)
                assert int(sequences["mark"].max()) < 64
            server.kill()
            learner.update(batch, newer(batch, 2))
            server = spawn_server(children, crash_dir, *options, name=server.name)
            with attach(server, STATES) as collector:
                collector.write(states(1000, 1064))
                collector.flush()
            learner.update_priorities(batch, of_mark(batch["mark"]))
            batch = learner.sample(48, by="priority", beta=1.0, timeout=TIMEOUT_S)
            if int(batch["mark"].min()) < 1000:  # made ready before the death
                learner.update_priorities(batch, of_mark(batch["mark"]))
                batch = learner.sample(48, by="priority", timeout=TIMEOUT_S)
            for _ in range(3):
                assert int(batch["mark"].min()) >= 1000
                assert batch.weights.unique().tolist() == [1.0]
                assert_fields(batch, as_written(batch))
                batch = learner.sample(48, by="priority", timeout=TIMEOUT_S)
            for _ in range(4):
                sequences = learner.sequences(8, length=4, timeout=TIMEOUT_S)
                assert len({bool(mark >= 1000) for mark in sequences["mark"].flatten()}) == 1
            assert int(sequences["mark"].min()) >= 1000
            assert_fields(sequences, as_written(sequences))
        assert server.stop() == 0

    # write back

    def test_new_values_are_seen_by_all_learners_until_the_row_is_overwritten(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, *SMALL, *COLUMNS)
        with (
            attach(server, STATES) as collector,
            storage.learner(server, prefetch=0) as learner,
            storage.learner(server, prefetch=0, name="other") as other,
        ):
            collector.write(states(0, 8))
            seq = collector.flush()
            batch = learner.sample(64, min_committed=seq)
            assert set(batch["mark"].tolist()) == set(range(8))
            learner.update(batch, newer(batch, 1))
            for later in (learner.sample(64), other.sample(64), other.sequences(8, length=4), other.sample(64, by="priority")):
                assert_fields(later, as_written(later) | newer(later, 1))
            batch = learner.sample(64)
            learner.update(batch, {"codes": newer(batch, 5)["codes"]})
            learner.update(batch, {"exact": newer(batch, 7)["exact"]})
            learner.sample(64)
            later = other.sample(64)
            newest = {"codes": newer(later, 5)["codes"], "exact": newer(later, 7)["exact"]}
            assert_fields(later, as_written(later) | newer(later, 1) | newest)
            collector.write(states(8, 300))
            later = other.sample(64, min_committed=collector.flush())
            assert_fields(later, as_written(later))

    def test_sequences_write_back_only_the_rows_under_their_mask(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, *SMALL, *COLUMNS)
        with attach(server, STATES) as collector, storage.learner(server, prefetch=0) as learner:
            collector.write(states(0, 24))
            collector.flush()
            batch = learner.sequences(10, length=6)
            assert not bool(batch.mask.all())
            written = torch.zeros(24, dtype=torch.bool)
            written[batch.seqs[batch.mask].cpu()] = True
            values = newer(batch, 3)
            values["hidden"] = torch.where(batch.mask[..., None], values["hidden"], torch.nan)
            learner.update(batch, values)
            later = learner.sequences(10, length=6)
            is_new = written.to(later.seqs.device)[later.seqs]
            assert_fields(later, newer(later, 3), is_new)
            assert_fields(later, as_written(later), ~is_new)
            assert learner.statistics().stale_writes == 0

    # what can't be served

    def test_missing_columns_and_roles_are_refused_with_the_remedy_and_other_requests_go_on(
        self, storage: Storage, start_server: Start
    ) -> None:
        """D04 among them: without a stored next value n-step is refused, the neighbour's never stands for it."""
        bare, kept, other = (storage.start(start_server, *SMALL, *columns) for columns in ((), COLUMNS, COLUMNS))
        without_pair = Schema.of(obs="float32", reward="float32", truncated="bool", terminated="bool")
        mutable = Schema.of(
            obs="float32", reward=Field("float32", mutable=True), next_obs="float32", terminated=Field("bool", mutable=True)
        )
        rows: dict[str, Any] = {"obs": np.zeros(8, np.float32), "reward": np.ones(8, np.float32)}
        rows |= {"terminated": np.zeros(8, np.bool_), "truncated": np.zeros(8, np.bool_)}
        for server, schema, refused in (
            (bare, LANES, ({"n_step": 3}, "n_step=3.*--columns link")),
            (bare, LANES, ({"length": 3}, r"sequences\(\).*--columns link")),
            (bare, LANES, ({"by": "priority"}, "by='priority'.*--columns priority")),
            (kept, without_pair, ({"n_step": 3}, "next_X")),
            (other, mutable, ({"n_step": 3}, "n_step=3.*reward, terminated.*newer values")),
            (other, mutable, ({"length": 3}, r"sequences\(\).*terminated.*newer values")),
        ):
            wanted, named = refused
            with attach(server, schema) as collector, storage.learner(server) as learner:
                full = {**rows, "next_obs": rows["obs"], "seq": np.arange(8)}
                if schema is LANES:
                    full |= {"obs": np.zeros((8, 3), np.float32), "next_obs": np.zeros((8, 3), np.float32)}
                collector.write({name: full[name] for name in schema.names})
                seq = collector.flush()
                draw: Any = learner.sequences if "length" in wanted else learner.sample
                for _ in range(2):
                    with pytest.raises(InvalidRequest, match=named):
                        draw(4, **wanted)
                assert len(learner.sample(4, min_committed=seq)) == 4

    def test_sequences_without_terminated_are_refused_unless_they_cross_episodes(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, *SMALL, *COLUMNS)
        with attach(server, MARKS) as collector, storage.learner(server) as learner:
            collector.write(marks(0, 32))
            collector.flush()
            with pytest.raises(InvalidRequest, match="'terminated'"):
                learner.sequences(4, length=3)
            with pytest.raises(InvalidRequest, match="'reward'"):
                learner.sample(4, n_step=3)
            with pytest.raises(InvalidRequest, match="'terminated'"):
                _ = learner.sample(4).bootstrap
            batch = learner.sequences(4, length=3, crosses_episodes=True)
            assert torch.equal(batch["mark"][batch.mask], batch.seqs[batch.mask])

    # mixed

    def test_mixed_batches_hold_exact_shares_of_two_servers(self, storage: Storage, start_server: Start) -> None:
        a = storage.start(start_server, "--capacity", "1000", "--slot-rows", "16", *COLUMNS)
        b = storage.start(start_server, "--capacity", "1000", "--slot-rows", "16")
        with (
            attach(a, MARKS) as to_a,
            attach(b, MARKS) as to_b,
            storage.learner(a, prefetch=0) as of_a,
            storage.learner(b, prefetch=0) as of_b,
        ):
            to_a.write(marks(0, 100))
            to_b.write(marks(1000, 1100))
            to_a.flush(), to_b.flush()
            mixed = MixedSampler([(of_a.sampler(15, by="priority"), 0.3), (of_b.sampler(15), 0.7)])
            counts = []
            for _ in range(20):
                batch = mixed.sample(timeout=TIMEOUT_S)
                counts.append(int((batch["mark"] < 1000).sum()))
                (part, rows), (_, others) = batch.parts
                assert (rows.start, rows.stop, others.start, others.stop) == (0, counts[-1], counts[-1], 15)
                assert torch.equal(batch["mark"][rows], part["mark"][: counts[-1]])
                assert torch.equal(batch.seqs, batch["mark"] - 1000 * (batch["mark"] >= 1000))
                mixed.update_priorities(batch, torch.arange(15.0))
            assert set(counts) == {4, 5}
            assert sum(counts) == 90
            assert [int((mixed.sample(shares=(1, 0))["mark"] < 1000).sum()) for _ in range(3)] == [15] * 3
            before = report_of(b)["flow"]["sampled_rows"]
            assert [int((mixed.sample(shares=(0, 2))["mark"] < 1000).sum()) for _ in range(3)] == [0] * 3
            for server, rows_taken in ((a, 90 + 45), (b, 210 + 45)):
                wait_report(server, lambda found: found["learners"][0]["open_leases"] == 0)
                assert report_of(server)["flow"]["sampled_rows"] == rows_taken
            assert before == 210, "nothing was asked of a sampler without a share"
            with pytest.raises(InvalidRequest, match="shares"):
                mixed.sample(shares=(0, 0))
            last = mixed.sample(shares=(1, 1))
            mixed.sample()
            with pytest.raises(InvalidRequest, match="ended with the next sample"):
                mixed.update_priorities(last, torch.ones(15))

    def test_mixed_batches_of_one_server_give_each_request_its_priorities(self, storage: Storage, start_server: Start) -> None:
        server = storage.start(start_server, *SMALL, *COLUMNS)
        with attach(server, LANES, lanes=2) as collector, storage.learner(server, prefetch=0) as learner:
            lanes = Lanes([collector], 16, random.Random(2))
            while len(lanes.rows) < 20:
                lanes.write()
            kinds: Sequence[dict[str, Any]] = ({"by": "priority"}, {"by": "priority", "half_life_rows": 5.0}, {"max_age_rows": 4})
            samplers = [learner.sampler(16, n_step=3, gamma=GAMMA, **kind) for kind in kinds]
            mixed = MixedSampler([(samplers[0], 0.5), (samplers[1], 0.25), (samplers[2], 0.25)])
            for _ in range(10):
                batch = mixed.sample(timeout=TIMEOUT_S)
                assert [rows.stop - rows.start for _, rows in batch.parts] == [8, 4, 4]
                check_n_step(lanes, batch, 3)
                assert int(batch.seqs[12:].min()) >= len(lanes.rows) - 4
                given = (batch.seqs == len(lanes.rows) - 1).float() + 0.5
                mixed.update_priorities(batch, given)
            assert set((batch.weights[:8] ** (-1 / 0.4)).round(decimals=2).tolist()) <= {1.0, round(3.0**0.6, 2)}

    def test_mixed_batches_of_different_rows_are_refused(self, storage: Storage, start_server: Start) -> None:
        a, b = (storage.start(start_server, *SMALL) for _ in range(2))
        with (
            attach(a, MARKS) as to_a,
            attach(b, Schema.of(mark="int32")) as to_b,
            storage.learner(a) as of_a,
            storage.learner(b) as of_b,
        ):
            to_a.write(marks(0, 16))
            to_b.write({"mark": np.arange(16, dtype=np.int32)})
            to_a.flush(), to_b.flush()
            with pytest.raises(SchemaMismatch, match="mark is int32, not int64"):
                MixedSampler([(of_a.sampler(8), 0.5), (of_b.sampler(8), 0.5)]).sample(timeout=TIMEOUT_S)
            assert len(of_a.sample(8)) == len(of_b.sample(8)) == 8

    # seeds

    def test_equal_seeds_draw_the_rows_of_the_cpu_ring_in_every_way(self, storage: Storage, start_server: Start) -> None:
        """Whole priorities and alpha 1: sums are exact, so even prioritized rows are equal on every device."""
        found = []
        for options, device in (((), "cpu"), (storage.server, storage.device)):
            server = start_server(*options, "--capacity", "100", "--slot-rows", "16", "--seed", "3", *COLUMNS)
            with attach(server, LANES, lanes=2) as collector, Storage((), device).learner(server, seed=5, prefetch=0) as learner:
                lanes = Lanes([collector], 16, random.Random(1))
                while len(lanes.rows) < 130:
                    lanes.write()
                found.append([drawn for turn in range(6) for drawn in _every_way(learner, len(lanes.rows), is_exact=device == "cpu")])
        of_cpu, of_storage = found
        for (name, expected), (_, rows) in zip(of_cpu, of_storage, strict=True):
            if name == "half_life" and storage.device != "cpu":
                assert np.abs(np.subtract(expected, rows)).max() <= 1, "log1p may differ in the last digit"
            elif name != "inexact" or storage.device == "cpu":
                assert rows == expected, name


def _every_way(learner: Learner, seq: int, *, is_exact: bool) -> list[tuple[str, list[Any]]]:
    fresh: dict[str, Any] = {"min_committed": seq, "timeout": TIMEOUT_S}
    by_priority = learner.sample(64, by="priority", alpha=1.0, **fresh)
    learner.update_priorities(by_priority, 1 + by_priority.seqs % 7)
    n_step = learner.sample(64, n_step=4, gamma=GAMMA, **fresh)
    sequences = learner.sequences(12, length=5, **fresh)
    both = learner.sample(64, by="priority", half_life_rows=16.0, alpha=0.7, **fresh)
    return [
        ("uniform", learner.sample(64, **fresh).seqs.tolist()),
        ("priority", by_priority.seqs.tolist()),
        ("n_step", [n_step.seqs.tolist(), n_step.n_steps.tolist(), n_step["reward"].tolist(), n_step["next_obs"].tolist()]),
        ("sequences", [sequences.seqs.tolist(), sequences.indices.tolist(), sequences.mask.tolist(), sequences.is_first.tolist()]),
        ("half_life", learner.sample(64, half_life_rows=20.0, **fresh).seqs.tolist()),
        ("inexact", both.seqs.tolist()),
    ]


def _counts(learner: Learner, batch: Batch) -> tuple[int, int, int]:
    """What a GPU has counted is known to the host once the work queued with the batch is done."""
    _settle(batch)
    found = learner.statistics()
    return found.stale_writes, found.refused_priorities, found.all_zero_draws


def _told(learner: Learner, batch: Batch, *, strict: bool) -> Batch:
    _settle(batch)
    return learner.sample(64, by="priority", strict=strict)


def _settle(batch: Batch) -> None:
    if batch.weights.is_cuda:
        torch.cuda.synchronize()


def _check_records(learner: Learner, fresh: dict[str, Any]) -> None:
    """Every row holds what was written with it or what the writer makes of its mark, and its own priority or the largest."""
    for _ in range(10):
        batch = learner.sample(64, by="priority", alpha=1.0, beta=1.0, **fresh)
        old, new = as_written(batch), newer(batch, 1)
        for name in MUTABLE:
            assert bool(((batch[name] == old[name]) | (batch[name] == new[name])).all()), name
        ratio, own = (1 / batch.weights.double()), of_mark(batch["mark"]).double()
        given = [ratio * least for least in range(1, 6)]  # by the batch's least priority, of which a ratio is a multiple
        assert any(bool((torch.isclose(p, own) | torch.isclose(p, torch.full_like(p, most))).all()) for p in given for most in (4.0, 5.0))
