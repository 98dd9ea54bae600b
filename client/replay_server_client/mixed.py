"""One batch from several requests or servers, in shares that may change at every call: offline data beside what comes in now, say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from replay_server_protocol.errors import InvalidRequest

from replay_server_client.deadline import Deadline
from replay_server_client.joint import Joint, MixedBatch
from replay_server_client.router import largest_remainder

if TYPE_CHECKING:
    from torch import Tensor

    from replay_server_client.sampler import Sampler


class MixedSampler:
    """``MixedSampler([(a, 0.5), (b, 0.5)])``: batches whose rows come from samplers of one kind (``Learner.sampler``) in these shares.

    Each sampler is made with the ``n`` of the whole batch: of what it draws the first rows are taken, as many as its share says, and only
    those count as sampled. Shares that are no whole rows are made up for over the calls. For the thread that uses the learners.
    """

    def __init__(self, parts: Sequence[tuple[Sampler, float]]) -> None:
        """Raises InvalidRequest for samplers of different requests, and for shares that are not 0 or above with a sum above 0."""
        self._samplers = [sampler for sampler, _ in parts]
        self._shares = self._check_shares([share for _, share in parts])
        requests = {(r.n, r.n_step, r.gamma, r.length, r.burn_in) for r in (sampler.request for sampler in self._samplers)}
        if len(requests) != 1 or len(self._samplers) < 2 or len(set(map(id, self._samplers))) != len(self._samplers):
            raise InvalidRequest("a mixed batch is made from two or more samplers with one n, n_step, gamma, length and burn_in")
        self._n = self._samplers[0].request.n
        self._owed = [0.0] * len(self._samplers)
        self._joint = Joint()
        self._last: MixedBatch | None = None

    def sample(self, *, shares: Sequence[float] | None = None, timeout: float | None = 5.0) -> MixedBatch:
        """The next batch. ``shares`` hold from this call on; they need not sum up to 1. Of a sampler whose share is 0 nothing is asked.

        Ends the batch before; its tensors' memory is written again by the call after this one, on the current stream. Raises what
        ``Sampler.sample`` raises, within one ``timeout`` for all; SchemaMismatch where the servers' rows differ.
        """
        if shares is not None:
            self._shares = self._check_shares(shares)
        if self._last is not None:
            self._last.expire()
        deadline = Deadline(timeout)
        counts = self._rows_of_parts()
        taken = []
        for sampler, count in zip(self._samplers, counts, strict=True):
            sampler.counted_rows = max(1, count * (sampler.request.rows // self._n))
            if count:
                left_s = None if timeout is None else deadline.remaining_s
                taken.append((sampler.sample(timeout=left_s), count))
        self._owed = [owed + self._n * share - count for owed, share, count in zip(self._owed, self._shares, counts, strict=True)]
        self._last = MixedBatch(*self._joint.join(taken))
        return self._last

    def update_priorities(self, batch: MixedBatch, priorities: Tensor | Sequence[float]) -> None:
        """As ``Learner.update_priorities``, for the parts that were drawn by priority; ``[n]`` values in the order of the batch."""
        batch.write_priorities(priorities)

    def _rows_of_parts(self) -> list[int]:
        """Whole rows that sum up to n; what is missing goes to the parts that are owed most."""
        due = [owed + self._n * share if share else 0.0 for owed, share in zip(self._owed, self._shares, strict=True)]
        return largest_remainder(due, self._n)

    def _check_shares(self, shares: Sequence[float]) -> list[float]:
        if len(shares) != len(self._samplers) or not all(math.isfinite(share) and share >= 0 for share in shares) or not sum(shares) > 0:
            raise InvalidRequest(f"shares={list(shares)!r}: {len(self._samplers)} numbers of at least 0, not all 0")
        return [share / sum(shares) for share in shares]
