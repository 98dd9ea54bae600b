"""What is wrong with a batch of marker rows. Runs where the batch lies; one number a kind of fault comes back to the host."""

from __future__ import annotations

import torch
from replay_server_client import Batch
from soaking.rows import CHECK, GAMMA, has_ended, is_terminated, is_truncated, mark_of, observed, reward_of
from torch import Tensor

Faults = dict[str, Tensor]


def judge(batch: Batch, n_step: int = 1) -> dict[str, int]:
    """Faults of a batch of transitions by kind; empty when there is none."""
    producer, lane, step = _names(batch)
    steps = batch.n_steps if n_step > 1 else torch.ones_like(step)
    last = step + steps - 1
    wrong = {
        "torn": _torn(batch, producer, lane, step),
        "stale": _stale(batch, batch.seqs, producer, lane, step),
        "observation": (batch["obs"] != _floats(producer, lane, step)).any(-1),
        "next observation": (batch["next_obs"] != _floats(producer, lane, last + 1)).any(-1),
        "end": (batch["terminated"] != is_terminated(producer, last)) | (batch["truncated"] != is_truncated(producer, last)),
        "reward": batch["reward"] != _return_of(producer, lane, step, steps, n_step),
        "steps": (steps < 1) | (steps > n_step) | _crosses_an_end(producer, step, steps, n_step),
        "weight": ~((batch.weights > 0) & (batch.weights <= 1)),
    }
    if n_step > 1:
        bootstrap = GAMMA ** steps.float() * ~is_terminated(producer, last)
        wrong["bootstrap"] = batch.bootstrap != bootstrap
    return _counted(wrong)


def judge_sequences(batch: Batch) -> dict[str, int]:
    """Faults of a batch of sequences: rows as above, and that each is the lane's next one."""
    producer, lane, step = _names(batch)
    mask, seqs = batch.mask, batch.seqs
    follows = mask[:, 1:]
    consecutive = (producer[:, 1:] == producer[:, :-1]) & (lane[:, 1:] == lane[:, :-1]) & (step[:, 1:] == step[:, :-1] + 1)
    wrong = {
        "torn": _torn(batch, producer, lane, step),
        "stale": _stale(batch, seqs, producer, lane, step),
        "observation": (batch["obs"] != _floats(producer, lane, step)).any(-1),
        "next observation": (batch["next_obs"] != _floats(producer, lane, step + 1)).any(-1),
        "reward": batch["reward"] != reward_of(lane, step),
        "not consecutive": follows & ~(consecutive & (seqs[:, 1:] > seqs[:, :-1])),
        "crosses an end": follows & has_ended(producer, step)[:, :-1],
        "hole in the mask": follows & ~mask[:, :-1],
        "no first row": ~mask[:, 0],
    }
    return _counted(wrong)


def _names(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch["producer"].long(), batch["lane"].long(), batch["step"]


def _floats(producer: Tensor, lane: Tensor, step: Tensor) -> Tensor:
    return torch.stack(observed(producer, lane, step), -1).float()


def _torn(batch: Batch, producer: Tensor, lane: Tensor, step: Tensor) -> Tensor:
    mark = mark_of(producer, lane, step)[..., None]
    spread = torch.arange(1, CHECK + 1, device=step.device)
    return (batch["check"] != mark * spread).any(-1) | (batch["tail"] != mark - spread).any(-1)


def _stale(batch: Batch, seqs: Tensor, producer: Tensor, lane: Tensor, step: Tensor) -> Tensor:
    """Rows outside the window, and rows of another lap: in a lane seqs rise with steps, and by no fewer."""
    tail, committed = batch.window
    outside = (seqs < tail) | (seqs >= committed)
    order = torch.argsort(seqs.flatten(), stable=True)
    order = order[torch.argsort((producer * 64 + lane).flatten()[order], stable=True)]
    lanes, rises = (producer * 64 + lane).flatten()[order], seqs.flatten()[order]
    same = lanes[1:] == lanes[:-1]
    seq_by, step_by = rises[1:] - rises[:-1], step.flatten()[order].diff()
    bad = same & ((seq_by < step_by) | ((seq_by == 0) != (step_by == 0)) | (step_by < 0))
    return torch.cat((outside.flatten(), bad))


def _return_of(producer: Tensor, lane: Tensor, step: Tensor, steps: Tensor, n_step: int) -> Tensor:
    total = torch.zeros_like(step, dtype=torch.float32)
    for i in range(n_step):
        total += torch.where(i < steps, reward_of(lane, step + i) * GAMMA**i, 0.0)
    return total


def _crosses_an_end(producer: Tensor, step: Tensor, steps: Tensor, n_step: int) -> Tensor:
    crosses = torch.zeros_like(step, dtype=torch.bool)
    for i in range(n_step - 1):
        crosses |= (i < steps - 1) & has_ended(producer, step + i)
    return crosses


def _counted(wrong: Faults) -> dict[str, int]:
    counts = torch.stack([each.sum() for each in wrong.values()]).tolist()
    return {kind: count for kind, count in zip(wrong, counts, strict=True) if count}
