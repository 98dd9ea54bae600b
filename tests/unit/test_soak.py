"""The soak's own judgement: a wrong row, a row of another lap, a broken sequence and a leak are found; sound ones are not."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PRODUCER, LANE = 20_000, 3


@pytest.fixture
def soaking(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Its modules, which no package holds."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    modules: dict[str, ModuleType] = {name: importlib.import_module(f"soaking.{name}") for name in ("rows", "judge", "drift", "gauges")}
    return SimpleNamespace(**modules)


class FakeBatch(dict[str, torch.Tensor]):
    """Rows of one lane as a batch would show them; ``seqs`` rise twice as fast as steps."""

    def __init__(self, soaking: Any, steps: list[int]) -> None:
        made = soaking.rows.make_rows(PRODUCER, np.full(len(steps), LANE), np.asarray(steps))
        super().__init__({name: torch.from_numpy(values.copy()) for name, values in made.items()})
        self.seqs = 2 * torch.tensor(steps) + 7
        self.window = (0, 1000)
        self.weights = torch.ones(len(steps))
        self.mask = torch.ones(len(steps), dtype=torch.bool)
        self.n_steps = torch.ones(len(steps), dtype=torch.int64)

    def as_sequence(self) -> FakeBatch:
        """All rows as one sequence."""
        for name in list(self):
            self[name] = self[name][None]
        self.seqs, self.mask = self.seqs[None], self.mask[None]
        return self


def test_sound_rows_have_no_fault(soaking: Any) -> None:
    assert soaking.judge.judge(FakeBatch(soaking, [5, 1, 9, 5])) == {}
    assert soaking.judge.judge_sequences(FakeBatch(soaking, [3, 4, 5, 6]).as_sequence()) == {}


@pytest.mark.parametrize("field", ["check", "tail", "obs", "next_obs", "reward"])
def test_one_wrong_element_is_found(soaking: Any, field: str) -> None:
    batch = FakeBatch(soaking, [5, 1, 9])
    batch[field].view(3, -1)[1, -1] += 1
    assert sum(soaking.judge.judge(batch).values()) == 1


def test_a_row_of_another_lap_is_found_though_it_is_whole(soaking: Any) -> None:
    batch = FakeBatch(soaking, [5, 1, 9])
    batch.seqs[1] += 500
    assert soaking.judge.judge(batch) == {"stale": 1}


def test_a_row_outside_the_window_is_found(soaking: Any) -> None:
    batch = FakeBatch(soaking, [5, 1, 9])
    batch.window = (0, int(batch.seqs.max()))
    assert soaking.judge.judge(batch) == {"stale": 1}


def test_a_sequence_that_skips_a_step_is_found(soaking: Any) -> None:
    assert soaking.judge.judge_sequences(FakeBatch(soaking, [3, 4, 6, 7]).as_sequence()) == {"not consecutive": 1}


def test_a_sequence_that_goes_on_after_an_end_is_found(soaking: Any) -> None:
    end = next(step for step in range(100) if soaking.rows.is_terminated(PRODUCER, np.int64(step)))
    assert soaking.judge.judge_sequences(FakeBatch(soaking, [end, end + 1]).as_sequence()) == {"crosses an end": 1}


def test_an_n_step_return_that_crosses_an_end_is_found(soaking: Any) -> None:
    end = next(step for step in range(1, 100) if soaking.rows.is_terminated(PRODUCER, np.int64(step)))
    batch = FakeBatch(soaking, [end])
    batch.n_steps = torch.tensor([3])
    batch.bootstrap = torch.zeros(1)  # type: ignore[attr-defined]
    assert "steps" in soaking.judge.judge(batch, 3)


def drift_of(soaking: Any, values: np.ndarray) -> Any:
    times = np.arange(len(values)) * 5.0
    return soaking.drift.drift_of("server RSS MB", "MB", times, values, 60.0, soaking.drift.Limit(8.0, 3.0))


def test_a_slow_leak_under_noise_is_found(soaking: Any) -> None:
    noise = np.random.default_rng(1).normal(0, 2, 360)
    leak = drift_of(soaking, 50 + noise + np.arange(360) * 5 * 20 / 3600)
    assert leak.is_leak
    assert leak.per_hour == pytest.approx(20, rel=0.1)


def test_noise_wild_points_and_warm_up_are_no_leak(soaking: Any) -> None:
    values = 50 + np.random.default_rng(2).normal(0, 1, 360)
    values[::7] += 100
    values[:12] = np.linspace(0, 50, 12)
    assert not drift_of(soaking, values).is_leak


def test_device_memory_is_that_of_the_servers_gpu_whatever_its_number(soaking: Any) -> None:
    used_mb = soaking.gauges.used_mb
    table = "GPU-aaaa, 1000\nGPU-bbbb, 10\nMIG-cccc, [N/A]\n"
    assert used_mb(table, "bbbb") == used_mb(table, "GPU-bbbb") == pytest.approx(10.48576)
    assert math.isnan(used_mb(table, "MIG-cccc"))
    assert math.isnan(used_mb("", "aaaa"))
