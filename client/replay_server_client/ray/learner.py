"""A learner of rings on several nodes: counts drawn by the router, rows asked of each shard's host, one batch of fixed memory.

```
router.draw(n) ─► k_i ─► host i draws k_i rows uniformly ─► its slice of the batch, (generation, size drawn under) ─► router.report
                           │ lost, or another generation
                           └─► router.redraw: its k_i from the rest
```

Knows nothing of Ray: a shard is whoever answers ``draw`` and ``size`` with futures.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from replay_server_protocol.errors import InvalidRequest, ReplayTimeout, ServerGone, shown
from torch import Tensor

from replay_server_client.deadline import Deadline
from replay_server_client.ray.host_service import HostService
from replay_server_client.ray.row_sampler import Drawn
from replay_server_client.router import ID_COLUMNS, Counts, Mode, OnLoss, Router

_LOOK_EVERY_S = 0.2
_LOOK_WAIT_S = 5.0
_LOOK_AGAIN_S = 0.02


class ShardHost(Protocol):
    """A shard as a learner reaches it. Futures raise ServerGone when it is lost; calls may raise it too."""

    def draw(self, n: int, key: Sequence[int], timeout_s: float) -> Future[Drawn]: ...

    def size(self) -> Future[tuple[int, int]]: ...

    def close(self) -> None: ...


class LocalHost:
    """The sidecar of this node, without a way round through an actor."""

    def __init__(self, server: str | None, run_dir: str | None) -> None:
        self._service = HostService(server, run_dir)
        self._pool = ThreadPoolExecutor(2, "local-shard")

    def draw(self, n: int, key: Sequence[int], timeout_s: float) -> Future[Drawn]:
        return self._pool.submit(self._service.draw, n, key, timeout_s)

    def size(self) -> Future[tuple[int, int]]:
        return self._pool.submit(self._service.size)

    def close(self) -> None:
        self._pool.shutdown()
        self._service.close()


class LearnerOptions(TypedDict, total=False):
    """Of ClusterLearner."""

    mode: Mode
    own: str | None
    min_size: int
    floor_rows: int | Sequence[int]
    on_loss: OnLoss
    seed: int
    device: str
    prefetch: bool


@dataclass(frozen=True, slots=True)
class ClusterBatch:
    """``fields`` dtype[n, *shape] and ``ids`` int64[n, 4] (shard, generation, index, seq) on the learner's device, rows of one shard after
    the other. ``sizes``: rows each shard had when it drew its part. The memory is written again by the next ``sample`` of the same n."""

    fields: dict[str, Tensor]
    ids: Tensor
    counts: Counts
    sizes: dict[str, int]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.fields:
            raise InvalidRequest(f"there is no field {shown(name)}; the batch has {', '.join(self.fields)}")
        return self.fields[name]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def epoch(self) -> int:
        return self.counts.epoch


@dataclass(slots=True)
class _Asked:
    """A batch whose rows are on their way: ``parts`` have come, each the place of its shard and its rows."""

    counts: Counts
    futures: dict[int, Future[Drawn]]
    parts: list[tuple[int, Drawn]]


class ClusterLearner:
    """Samples from several shards as from one. For one thread at a time. ``router`` is to be read, not told."""

    def __init__(
        self,
        hosts: Mapping[str, ShardHost],
        *,
        mode: Mode = "global",
        own: str | None = None,
        min_size: int = 1,
        floor_rows: int | Sequence[int] = 1,
        on_loss: OnLoss = "redraw",
        seed: int = 0,
        device: str = "cpu",
        prefetch: bool = True,
    ) -> None:
        """``mode`` to ``on_loss`` are the router's. With ``prefetch`` the next batch is asked for as one is returned: its counts follow the
        sizes of that moment, and rows of a shard that is lost just then may still be in it; without, each call waits for a round trip."""
        self.router = Router(list(hosts), mode=mode, own=own, seed=seed, min_size=min_size, floor_rows=floor_rows, on_loss=on_loss)
        self.losses = 0
        self._hosts = dict(hosts)
        self._seed = seed
        self._device = torch.device(device)
        self._is_prefetching = prefetch
        self._looks: dict[str, Future[tuple[int, int]]] = {}
        self._look_at_s = dict.fromkeys(hosts, 0.0)
        self._number = 0
        self._ahead: dict[int, _Asked] = {}
        self._memory: dict[int, _BatchMemory] = {}
        self._was_ready = False

    def wait_ready(self, timeout: float | None = None) -> None:
        """Returns once sampling may begin. Raises ReplayTimeout naming what is missing."""
        deadline = Deadline(timeout)
        while True:
            self._look()
            if not self.router.missing():
                self._was_ready = True
                return
            if deadline.has_passed:
                raise ReplayTimeout(f"wait_ready waited {deadline.elapsed_s:.2f} s: {self.router.missing()}")
            time.sleep(min(_LOOK_AGAIN_S, deadline.remaining_s))

    def sample(self, n: int, *, timeout: float | None = 5.0) -> ClusterBatch:
        """``n`` rows of the union. Ends the batch of ``n`` before.

        Raises ReplayTimeout naming the shard, ShardLost where a loss is to be raised or no shard is left, and what a sidecar refuses.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InvalidRequest(f"sample({shown(n)}): rows, at least 1")
        deadline = Deadline(timeout)
        if not self._was_ready:
            self.wait_ready(timeout)
        self._look()
        asked = self._ahead.pop(n, None) or self._ask(self.router.draw(n), [], deadline)
        while asked.futures:
            lost = self._collect(asked, deadline)
            if lost:
                asked = self._ask(self.router.redraw(asked.counts, lost), self._kept(asked, lost), deadline)
        batch = self._filled(n, asked)
        if self._is_prefetching and self.router.taking_part:
            self._ahead[n] = self._ask(self.router.draw(n), [], deadline)
        return batch

    def close(self) -> None:
        """Lets go of the hosts. Safe to call twice."""
        for asked in self._ahead.values():
            for future in asked.futures.values():
                future.cancel()
        self._ahead.clear()
        for host in self._hosts.values():
            host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, counts: Counts, parts: list[tuple[int, Drawn]], deadline: Deadline) -> _Asked:
        """Asks each shard for what is due and has not come."""
        have = dict.fromkeys(range(len(counts.rows)), 0)
        for place, drawn in parts:
            have[place] += len(drawn.seqs)
        futures: dict[int, Future[Drawn]] = {}
        for place, rows in enumerate(counts.rows):
            if rows > have[place]:
                self._number += 1
                futures[place] = self._draw(place, rows - have[place], deadline)
        return _Asked(counts, futures, parts)

    def _draw(self, place: int, rows: int, deadline: Deadline) -> Future[Drawn]:
        wait_s = min(deadline.remaining_s, 3600.0)
        try:
            return self._hosts[self.router.shards[place]].draw(rows, (self._seed, place, self._number), wait_s)
        except ServerGone as gone:
            failed: Future[Drawn] = Future()
            failed.set_exception(gone)
            return failed

    def _collect(self, asked: _Asked, deadline: Deadline) -> list[str]:
        """Waits for all that was asked for; returns the shards that are lost."""
        lost = []
        for place, future in list(asked.futures.items()):
            shard = self.router.shards[place]
            try:
                drawn = future.result(None if deadline.timeout_s is None else deadline.remaining_s)
            except ServerGone:
                lost.append(shard)
                continue
            except ReplayTimeout as late:
                raise ReplayTimeout(f"shard {shard!r}: {late.message}", **late.details) from late
            except (FutureTimeout, TimeoutError) as late:
                raise ReplayTimeout(f"shard {shard!r} has not answered after {deadline.elapsed_s:.2f} s") from late
            finally:
                del asked.futures[place]
            if drawn.generation != asked.counts.generations[place]:
                lost.append(shard)  # another ring: it joins again by its size, above its floor
                continue
            self.router.report(shard, generation=drawn.generation, size_rows=drawn.size_rows)
            asked.parts.append((place, drawn))
        self.losses += len(lost)
        return lost

    def _kept(self, asked: _Asked, lost: Sequence[str]) -> list[tuple[int, Drawn]]:
        return [(place, drawn) for place, drawn in asked.parts if self.router.shards[place] not in lost]

    def _filled(self, n: int, asked: _Asked) -> ClusterBatch:
        parts = sorted(asked.parts, key=lambda part: part[0])
        if n not in self._memory:
            self._memory[n] = _BatchMemory(n, parts[0][1], self._device)
        sizes = {self.router.shards[place]: drawn.size_rows for place, drawn in parts}
        fields, ids = self._memory[n].fill(parts)
        return ClusterBatch(fields, ids, asked.counts, sizes)

    def _look(self) -> None:
        """Asks shards that take no part what they hold, five times a second; never waits."""
        now_s = time.monotonic()
        for shard, host in self._hosts.items():
            if shard in self.router.taking_part:
                continue
            look = self._looks.get(shard)
            if look is not None and look.done():
                self._take_look(shard, self._looks.pop(shard))
            elif look is None and now_s >= self._look_at_s[shard]:
                self._look_at_s[shard] = now_s + _LOOK_EVERY_S
                with contextlib.suppress(ServerGone):
                    self._looks[shard] = host.size()
            elif look is not None and now_s >= self._look_at_s[shard] + _LOOK_WAIT_S:
                del self._looks[shard]  # asked of an actor that is no more

    def _take_look(self, shard: str, look: Future[tuple[int, int]]) -> None:
        with contextlib.suppress(ServerGone):
            generation, size_rows = look.result()
            self.router.report(shard, generation=generation, size_rows=size_rows)


class _BatchMemory:
    """Fixed tensors of ``n`` rows on the learner's device, and pinned ones on the host where that is a GPU."""

    def __init__(self, n: int, like: Drawn, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._host = {name: _tensor(n, array).pin_memory() if is_gpu else _tensor(n, array) for name, array in like.fields.items()}
        self._host_ids = torch.empty(n, len(ID_COLUMNS), dtype=torch.int64, pin_memory=is_gpu)
        self._fields = {name: torch.empty_like(tensor, device=device) for name, tensor in self._host.items()} if is_gpu else self._host
        self._ids = torch.empty_like(self._host_ids, device=device) if is_gpu else self._host_ids
        self._is_copied = torch.cuda.Event() if is_gpu else None

    def fill(self, parts: Sequence[tuple[int, Drawn]]) -> tuple[dict[str, Tensor], Tensor]:
        if self._is_copied is not None:
            self._is_copied.synchronize()
        end, ids = 0, self._host_ids.numpy()
        for place, drawn in parts:
            begin, end = end, end + len(drawn.seqs)
            for name, values in drawn.fields.items():
                host = self._host[name]
                view = host.view(torch.uint16) if host.dtype == torch.bfloat16 else host
                view.numpy()[begin:end] = values
            ids[begin:end, 0], ids[begin:end, 1] = place, drawn.generation
            ids[begin:end, 2], ids[begin:end, 3] = drawn.seqs % drawn.ring_rows, drawn.seqs
        if self._is_copied is not None:
            for name, tensor in self._host.items():
                self._fields[name].copy_(tensor, non_blocking=True)
            self._ids.copy_(self._host_ids, non_blocking=True)
            self._is_copied.record()
        return dict(self._fields), self._ids


def _tensor(n: int, array: npt.NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.empty((n, *array.shape[1:]), array.dtype))
