"""What every learner of several rings does: it waits for its shards, and gives batches of the union of their rows."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Generic, Self, TypeVar, Unpack

from replay_server_protocol.errors import InvalidRequest, ReplayTimeout

from replay_server_client.batch import Batch
from replay_server_client.deadline import Deadline
from replay_server_client.request import Request, RequestOptions, with_masses
from replay_server_client.router import Router

LOOK_AGAIN_S = 0.02
"""Rows that come to shards that take no part are no event here: they are looked for."""

B = TypeVar("B", bound=Batch)


class UnionLearner(ABC, Generic[B]):
    """Samples from several shards as from one. For one thread at a time. ``router`` knows the shards; it is to be read, not told."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._was_ready = False

    @property
    def shards(self) -> tuple[str, ...]:
        """Names of the shards; the shard of an id is its place here."""
        return self.router.shards

    def wait_ready(self, timeout: float | None = None) -> None:
        """Returns once sampling may begin: every shard holds its floor, all together ``min_size`` rows.

        Raises ReplayTimeout naming what is missing.
        """
        deadline = Deadline(timeout)
        while not self._is_ready():
            if deadline.has_passed:
                raise ReplayTimeout(f"wait_ready waited {deadline.elapsed_s:.2f} s: {self.router.missing()}")
            time.sleep(min(LOOK_AGAIN_S, deadline.remaining_s))
        self._was_ready = True

    def sample(
        self,
        n: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        timeout: float | None = 5.0,
        alpha: float | None = None,
        beta: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> B:
        """The next batch of ``n`` transitions of the union. Arguments as of ``Learner.sample``. Ends the batch of the same request before.

        Raises what ``Learner.sample`` raises, naming the shard, and ShardLost where a loss is to be raised or no shard is left.
        """
        return self._sample(Request.transitions(n, n_step=n_step, gamma=gamma, **options), timeout, alpha, beta)

    def sequences(
        self,
        n: int,
        *,
        length: int = 64,
        burn_in: int = 0,
        stride: int = 1,
        crosses_episodes: bool = False,
        timeout: float | None = 5.0,
        alpha: float | None = None,
        beta: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> B:
        """As ``sample``, of what ``Learner.sequences`` gives: any row of the union is equally likely to be a first row."""
        request = Request.sequences(n, length=length, burn_in=burn_in, stride=stride, crosses_episodes=crosses_episodes, **options)
        return self._sample(request, timeout, alpha, beta)

    @abstractmethod
    def close(self) -> None:
        """Lets go of the shards. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def _is_ready(self) -> bool:
        """Looks at shards that take no part yet. Whether sampling may begin."""

    @abstractmethod
    def _sample(self, asked: Request, timeout: float | None, alpha: float | None, beta: float | None) -> B: ...


def request_of_each(asked: Request) -> Request:
    """What is asked of each shard for a batch of the union: by priority the masses of its draws, too.

    Raises InvalidRequest for draws whose chances over several shards nobody could tell.
    """
    if asked.half_life_rows is not None and not asked.is_by_priority:
        raise InvalidRequest("half_life_rows over several shards needs by='priority': uniform ones don't tell the mass of their rows")
    return with_masses(asked) if asked.is_by_priority else asked
