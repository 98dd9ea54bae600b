"""The learners of the soak: uniform, prioritized, n-step and sequences, every row judged; some stay, some come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from replay_server_client import Batch, Learner, ReplayTimeout
from soaking.judge import judge, judge_sequences
from soaking.place import PATIENCE_S, Place
from soaking.rows import GAMMA
from soaking.telling import Teller

BATCH_ROWS, SEQUENCES, LENGTH, N_STEP = 256, 24, 16, 3
_POST_EVERY_S = 1.0


@dataclass(frozen=True)
class Way:
    """A way to sample, and how its batches are judged."""

    name: str
    draw: Callable[[Learner], Batch]
    judge: Callable[[Batch], dict[str, int]]
    gives_priorities: bool = False


UNIFORM = Way("uniform", lambda learner: learner.sample(BATCH_ROWS, timeout=PATIENCE_S), judge)
PRIORITIZED = Way("prioritized", lambda learner: learner.sample(BATCH_ROWS, by="priority", timeout=PATIENCE_S), judge, True)
STEPS = Way(
    "n-step",
    lambda learner: learner.sample(BATCH_ROWS, n_step=N_STEP, gamma=GAMMA, timeout=PATIENCE_S),
    partial(judge, n_step=N_STEP),
)
WINDOWS = Way("sequences", lambda learner: learner.sequences(SEQUENCES, length=LENGTH, timeout=PATIENCE_S), judge_sequences)
ALL = (UNIFORM, PRIORITIZED, STEPS, WINDOWS)


def learn_uniform(place: Place, teller: Teller, first: int) -> None:
    """Uniform batches, and a new policy in the mailbox each second."""
    _stay(place, teller, first, (UNIFORM,), posts=True)


def learn_by_priority(place: Place, teller: Teller, first: int) -> None:
    _stay(place, teller, first, (PRIORITIZED,))


def learn_along_lanes(place: Place, teller: Teller, first: int) -> None:
    """n-step transitions and sequences in turn."""
    _stay(place, teller, first, (STEPS, WINDOWS))


def learn_in_every_way(place: Place, teller: Teller, first: int) -> None:
    """All of it in one process: importing torch is most of a short run."""
    _stay(place, teller, first, ALL, posts=True)


def learn_now_and_then(place: Place, teller: Teller, first: int) -> None:
    """Connects, samples for a while in some ways, closes (or is dropped without a word), rests, and comes back."""
    dice = _prepare(place, first)
    while not teller.is_over():
        learner = _connect(place, teller, first, prefetch=int(dice.integers(0, 3)))
        leaves_s = time.monotonic() + dice.uniform(0.2, 6)
        ways = [ALL[i] for i in dice.permutation(len(ALL))[: dice.integers(1, 4)]]
        while not teller.is_over() and time.monotonic() < leaves_s:
            _sample(learner, teller, ways[int(dice.integers(len(ways)))])
            time.sleep(place.update_s)
        if dice.random() < 0.8:
            learner.close()
        del learner
        teller.rest(float(dice.uniform(0, 1)))


def _stay(place: Place, teller: Teller, first: int, ways: Sequence[Way], *, posts: bool = False) -> None:
    _prepare(place, first)
    with _connect(place, teller, first, prefetch=1) as learner:
        number, post_at_s = 0, 0.0
        while not teller.is_over():
            for way in ways:
                _sample(learner, teller, way)
            if posts and time.monotonic() >= post_at_s:
                number, post_at_s = number + 1, time.monotonic() + _POST_EVERY_S
                learner.post(
                    "policy", {"number": np.full(1, number), "w": np.full(20_000, number), "b": np.full((7, 3), number)}, PATIENCE_S
                )
                teller.count(letters=1)
            time.sleep(place.update_s)


def _prepare(place: Place, first: int) -> Any:
    torch.set_num_threads(1)
    return np.random.default_rng((place.seed, first))


def _connect(place: Place, teller: Teller, first: int, prefetch: int) -> Learner:
    teller.count(sessions=1)
    return Learner.connect(
        place.name, device=place.device, seed=first, name=teller.who, prefetch=prefetch, run_dir=place.run_dir, timeout=PATIENCE_S
    )


def _sample(learner: Learner, teller: Teller, way: Way) -> None:
    """One batch, judged. Three gathers in a row that outlast their lease are a busy machine's doing: counted, no fault."""
    begin_s = time.monotonic()
    try:
        batch = way.draw(learner)
    except ReplayTimeout as late:
        if "gather_ms" not in late.details:
            raise
        teller.count(timeouts=1)
        return
    teller.done(begin_s, batch.seqs.numel())
    faults = way.judge(batch)
    if faults:
        teller.fault(f"{way.name}, batch {batch.number} of window {batch.window}: {faults}")
    if way.gives_priorities:
        learner.update_priorities(batch, 0.1 + (batch["step"] % 13).float())
