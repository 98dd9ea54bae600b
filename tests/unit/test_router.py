"""The router: counts that make the union uniform, membership by epochs, and what a loss leaves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from replay_server_client.router import Counts, Router, importance_weights, largest_remainder
from replay_server_protocol.errors import InvalidRequest, ShardLost

SIZES = {"a": 100, "b": 300, "c": 600}


def make(**options: object) -> Router:
    router = Router(tuple(SIZES), **options)  # type: ignore[arg-type]
    for name, rows in SIZES.items():
        router.report(name, generation=1, size_rows=rows)
    return router


def rows_drawn(router: Router, draws: int, n: int, rng: np.random.Generator, *, by_shard: dict[str, int]) -> np.ndarray:
    """How often each row of the union came, its shard's counts spread by ``rng`` uniformly over the rows it has then."""
    names = router.shards
    seen = {name: np.zeros(rows, np.int64) for name, rows in by_shard.items()}
    for _ in range(draws // n):
        for name, count in zip(names, router.draw(n).rows, strict=True):
            size = router.state(name).size_rows
            if count:
                seen[name] += np.bincount(rng.integers(0, size, count), minlength=len(seen[name]))
    return np.concatenate([seen[name] for name in names])


def test_a_million_rows_of_three_shards_are_uniform_over_the_union() -> None:
    seen = rows_drawn(make(seed=3), 1_000_000, 250, np.random.default_rng(1), by_shard=SIZES)
    assert seen.sum() == 1_000_000
    assert is_uniform(seen)


def test_equal_shares_for_unequal_shards_would_not_pass_as_uniform() -> None:
    """The bound is sharp enough to see what it is for."""
    router = make(seed=3)
    for name in SIZES:
        router.report(name, generation=1, size_rows=500)
    assert not is_uniform(rows_drawn_by(router.draw(250).rows for _ in range(4000)))


def rows_drawn_by(draws: object) -> np.ndarray:
    rng, seen = np.random.default_rng(2), [np.zeros(rows, np.int64) for rows in SIZES.values()]
    for rows in draws:  # type: ignore[attr-defined]
        for shard, count in enumerate(rows):
            seen[shard] += np.bincount(rng.integers(0, len(seen[shard]), count), minlength=len(seen[shard]))
    return np.concatenate(seen)


def is_uniform(seen: np.ndarray) -> bool:
    """Pearson's chi-square within 5 standard deviations of its mean: a right draw fails once in a million."""
    expected = seen.sum() / len(seen)
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(seen) - 1
    return bool(abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom))


def test_while_a_shard_fills_each_moment_is_uniform_over_what_is_there() -> None:
    """Row i of the filling shard can come from the moment it is there; what came of it then is as often as of any other row."""
    router, rng = make(seed=5), np.random.default_rng(6)
    expected, seen = np.zeros(1000), np.zeros(1000)
    for size in range(60, 601, 60):
        router.report("c", generation=1, size_rows=size)
        drawn = rows_drawn(router, 50_000, 250, rng, by_shard=SIZES)
        seen += drawn
        expected[: 400 + size] += 50_000 / (400 + size)
        assert not drawn[400 + size :].any()
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert abs(chi_square - 999) < 5 * np.sqrt(2 * 999)


def test_after_a_loss_the_rest_is_uniform_and_of_the_lost_shard_nothing_comes() -> None:
    router = make(seed=7)
    epoch = router.epoch
    router.lose("b")
    seen = rows_drawn(router, 500_000, 250, np.random.default_rng(8), by_shard=SIZES)
    assert router.epoch == epoch + 1
    assert not seen[100:400].any()
    assert is_uniform(np.concatenate((seen[:100], seen[400:])))


def test_redrawn_counts_are_those_of_a_batch_without_the_lost_shard() -> None:
    totals = np.zeros(3)
    for seed in range(2000):
        router = make(seed=seed)
        counts = router.redraw(router.draw(64), ["c"])
        assert counts.n == 64
        totals += counts.rows
    expected = 2000 * 64 * np.array([0.25, 0.75])
    assert totals[2] == 0
    assert (abs(totals[:2] - expected) < 5 * np.sqrt(2000 * 64 * 0.25 * 0.75)).all()


def test_stratified_counts_are_the_same_each_time_and_off_by_less_than_one_row() -> None:
    router = make(mode="stratified")
    first = router.draw(256)
    assert first.rows == router.draw(256).rows
    assert first.n == 256
    for rows, size in zip(first.rows, SIZES.values(), strict=True):
        assert abs(rows - 256 * size / 1000) < 1


def test_local_takes_all_from_its_own_shard_and_waits_for_no_other() -> None:
    router = Router(("a", "b"), mode="local", own="b")
    assert "'b' has not answered" in router.missing()
    router.report("b", generation=1, size_rows=1)
    assert router.missing() == ""
    assert router.draw(9).rows == (0, 9)


def test_equal_seeds_draw_equal_counts_and_others_differ() -> None:
    draws = [[make(seed=seed).draw(1000).rows for _ in range(2)] for seed in (1, 2)]
    assert draws[0][0] == draws[0][1] != draws[1][0]


def test_by_mass_the_masses_stand_for_the_sizes() -> None:
    router = make(mode="stratified")
    for name, mass in (("a", 5.0), ("b", 0.0), ("c", 15.0)):
        router.report(name, generation=1, size_rows=SIZES[name], mass=mass)
    assert router.draw(80, by_mass=True).rows == (20, 0, 60)
    assert router.mass == 20.0


def test_without_any_mass_sizes_count() -> None:
    assert make(mode="stratified").draw(10, by_mass=True).rows == (1, 3, 6)


def test_a_shard_below_its_floor_takes_no_part_and_is_waited_for_by_name() -> None:
    router = Router(("a", "b"), floor_rows=(1, 50))
    router.report("a", generation=1, size_rows=100)
    router.report("b", generation=1, size_rows=49)
    assert router.missing() == "each shard needs its floor_rows (50): 'b' has 49"
    assert router.draw(5).rows == (5, 0)
    epoch = router.epoch
    router.report("b", generation=1, size_rows=50)
    assert router.missing() == ""
    assert (router.taking_part, router.epoch) == (("a", "b"), epoch + 1)


def test_min_size_is_over_the_sum() -> None:
    assert make(min_size=1000).missing() == ""
    assert make(min_size=1001).missing() == "need 1,001 rows over all shards, have 1,000"


def test_sizes_that_grow_are_no_new_epoch_and_a_new_generation_is_one() -> None:
    router = make()
    epoch = router.epoch
    router.report("a", generation=1, size_rows=101)
    assert router.epoch == epoch
    router.report("a", generation=2, size_rows=101)
    assert router.epoch == epoch + 1


def test_a_later_generation_is_known_by_its_coming_later_whatever_its_number() -> None:
    """The clock that numbers them may have been set back."""
    router = make()
    assert router.report("a", generation=5, size_rows=101)
    router.lose("a")
    assert router.report("a", generation=3, size_rows=101)
    for left in (0, 1, 5):
        assert not router.report("a", generation=left, size_rows=7)
    assert (router.state("a").generation, router.state("a").size_rows) == (3, 101)


def test_a_lost_shard_joins_again_with_rows_and_a_generation_that_it_has_not_left() -> None:
    router = make(floor_rows=10)
    router.lose("c")
    router.lose("c")
    assert router.missing() == ""  # what was lost is not waited for
    assert not router.report("c", generation=0, size_rows=600)
    assert router.report("c", generation=2, size_rows=9)
    assert ",".join(router.taking_part) == "a,b"
    router.report("c", generation=2, size_rows=10)
    assert ",".join(router.taking_part) == "a,b,c"


def test_a_loss_that_is_to_be_raised_is_until_the_shard_is_back() -> None:
    router = make(on_loss="raise")
    counts = router.draw(10)
    with pytest.raises(ShardLost, match="'b' is lost") as caught:
        router.redraw(counts, ["b"])
    assert caught.value.details == {"shard": "b"}
    router.report("b", generation=2, size_rows=1)
    assert router.draw(10).n == 10


def test_with_no_shard_left_every_mode_raises() -> None:
    for router in (make(), make(mode="local", own="a"), make(mode="stratified")):
        for name in SIZES:
            router.lose(name)
        with pytest.raises(ShardLost, match="no shard is left"):
            router.draw(1)


def test_ids_are_grouped_by_shard_and_stale_ones_counted() -> None:
    router = make()
    router.report("b", generation=2, size_rows=300)
    router.lose("c")
    ids = np.array([[0, 1, 5, 5], [1, 1, 6, 6], [1, 2, 7, 7], [2, 1, 8, 8], [0, 1, 9, 9], [9, 1, 0, 0], [-1, 1, 0, 0]], np.int64)
    groups = router.groups(ids)
    assert [places.tolist() for places in groups.places] == [[0, 4], [2], []]
    assert groups.stale == 4


def test_weights_are_those_of_the_formula_over_the_largest_of_all_shards() -> None:
    priorities, n_rows, mass, least, beta = np.array([0.5, 2.0, 8.0]), 40, 55.0, 0.25, 0.4
    largest = (n_rows * least / mass) ** -beta
    np.testing.assert_allclose(importance_weights(priorities, least, beta), (n_rows * priorities / mass) ** -beta / largest)


@pytest.mark.parametrize(
    "options",
    [
        {"shards": ()},
        {"shards": ("a", "a")},
        {"mode": "all"},
        {"on_loss": "wait"},
        {"own": "a"},
        {"mode": "local"},
        {"mode": "local", "own": "z"},
        {"floor_rows": (1, 2, 3)},
        {"floor_rows": -1},
        {"min_size": 1.5},
        {"seed": "x"},
    ],
)
def test_what_makes_no_router_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        Router(**{"shards": ("a", "b"), **options})  # type: ignore[arg-type]


def test_largest_remainder_gives_all_and_nothing_to_who_is_due_nothing() -> None:
    for due in itertools.product((0.0, 0.4, 1.0, 2.6), repeat=3):
        n = round(sum(due))
        if not sum(due):
            continue
        rows = largest_remainder(due, n)
        assert sum(rows) == n
        assert all(count == 0 for count, wanted in zip(rows, due, strict=True) if not wanted)


def test_counts_say_what_they_were_drawn_under() -> None:
    router = make()
    counts = router.draw(10)
    assert counts == Counts(router.epoch, counts.rows, (1, 1, 1), (100, 300, 600))
