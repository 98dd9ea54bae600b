#!/usr/bin/env python3
"""Delivery and sampling past any machine at hand: the real Credits, Delivery, Origins and Router against simulated shards and networks.

Real here: credits on both sides, which publishes go into which chunk, window, go-back and waits between failures, the receiver's judgement,
membership, epochs, counts and redraws. Simulated: time. The assumptions, each with a number of its own in ``Costs``:

1. A call costs its sender ``call_s`` and its bytes at ``copy_bandwidth`` of one thread, one after the other. Chunks up to 100 KB travel in
   the call itself (``inline_…``), larger ones by the object store.
2. Bytes cross a link at ``bandwidth`` after ``latency_s`` each way; a node's calls share its link in the order in which they were sent.
3. A host serves calls one at a time: ``serve_s`` each, and its bytes at ``commit_bandwidth`` (Ray's copies and the slots' together).
4. A killed host answers nothing, loses what it knew, and is back after ``restart_s``; a lost node does not come back; its calls fail
   after ``notice_s``. Sidecars keep their rings, but those on a lost node.
5. Shards fill at a steady rate up to their capacity, and are uniform inside: which rows a shard draws is not simulated.
6. Shards don't share cores or links, so what one takes in, S take in S times. On the machine of the measurement they all share: there two
   shards' times add up, and so they do in ``check``.
7. While a sidecar commits nothing (samples per insert, say), it keeps what it has credits for; the host answers after ``deliver_wait_s``.

The first three are fitted to the runs of scripts/bench_ray.py on two nodes of one machine, and ``check`` puts model beside measurement:
rates with a window of one and of four are what it was fitted to, those with two, and the times of two shards, are its own word.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from replay_server_client.ray.delivery import Chunk, Delivery, Part
from replay_server_client.router import Router
from replay_server_protocol.origins import Origins, Turn

from replay_server.credit import Credits

INLINE_BYTES = 100_000


@dataclass(frozen=True)
class Costs:
    call_s: float = 0.0008
    copy_bandwidth: float = 2.0e9
    latency_s: float = 0.0001
    bandwidth: float = 12.5e9 * 0.8
    serve_s: float = 0.0004
    commit_bandwidth: float = 1.0e9
    restart_s: float = 1.7
    notice_s: float = 1.8
    row_s: float = 5e-7
    inline_call_s: float = 0.0006
    inline_serve_s: float = 0.0004
    deliver_wait_s: float = 2.0

    def of_call(self, n_bytes: int) -> tuple[float, float]:
        """What a chunk of this size costs sender and host, its bytes' time left out."""
        return (self.inline_call_s, self.inline_serve_s) if n_bytes <= INLINE_BYTES else (self.call_s, self.serve_s)

    @classmethod
    def fitted(cls, measured: dict[str, Any]) -> Costs:
        """Seconds a call = a + bytes / b, through the larger chunks. With four on their way the slower side is what all wait for, taken to
        be the host; what a lone chunk takes beyond it is the sender's. A loopback has no bandwidth of its own. ``row_s``: what a row
        adds to a batch of one shard.
        """

        def line(window: int) -> tuple[float, float, float]:
            """(a of large chunks, 1 / b, a of inline ones)."""
            runs = sorted((run for run in measured["carried"] if run["window"] == window), key=lambda run: run["chunk_bytes"])
            size = [run["mib_per_s"] * 2**20 / run["calls_per_s"] for run in runs]
            took = [1 / run["calls_per_s"] for run in runs]
            per_byte = max(1e-11, (took[-1] - took[-2]) / (size[-1] - size[-2]))
            return max(1e-5, took[-1] - per_byte * size[-1]), per_byte, max(1e-5, took[0] - per_byte * size[0])

        (alone_s, alone_per_byte, alone_inline_s), (host_s, host_per_byte, host_inline_s) = line(1), line(4)
        lone = {run["n"]: run["ms_per_batch"] / 1e3 for run in measured["batches"] if run["shards"] == 1 and not run["prefetch"]}
        small, large = min(lone), max(lone)
        return cls(
            call_s=max(1e-5, alone_s - host_s),
            copy_bandwidth=1 / max(1e-11, alone_per_byte - host_per_byte),
            latency_s=2e-5,
            bandwidth=1e12,
            serve_s=host_s,
            commit_bandwidth=1 / host_per_byte,
            row_s=max(1e-8, (lone[large] - lone[small]) / (large - small)),
            inline_call_s=max(1e-5, alone_inline_s - host_inline_s),
            inline_serve_s=host_inline_s,
            restart_s=float(np.median(measured["host_recovery_s"])),
        )


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ordinal = 0

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        self._ordinal += 1
        heapq.heappush(self._events, (max(time_s, self.now_s), self._ordinal, event))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = until_s


class Slots:
    """Credits of one collector: a free slot for each publish, given back when that is committed."""

    def __init__(self, depth: int) -> None:
        self.credits = Credits(depth)
        self._free = deque(range(depth))
        self._used: deque[tuple[int, int]] = deque()

    @property
    def is_free(self) -> bool:
        return bool(self._free)

    def take(self) -> int:
        """The number of the publish that takes a slot."""
        number, slot = self.credits.taken + 1, self._free.popleft()
        self.credits.take(number, slot)
        self.credits.submit(slot)
        self._used.append((number, slot))
        return number

    def credit_oldest(self) -> None:
        number, slot = self._used.popleft()
        self.credits.credit(number, slot)
        self._free.append(slot)


class Host:
    """A host and the sidecar behind it: what a chunk's parts become, and when its answer leaves."""

    def __init__(self, clock: Clock, costs: Costs, depth: int = 32) -> None:
        self.costs = costs
        self.life = 0
        self.committed_bytes = 0
        self.committed_parts = 0
        self.repeats = 0
        self.up_at_s = 0.0
        self.is_stalled = False
        self._clock = clock
        self._depth = depth
        self._free_at_s = 0.0
        self._known, self._sidecar = Origins(), Origins()
        self._slots: dict[str, Slots] = {}
        self._uncommitted: deque[Part[None]] = deque()
        self._through: dict[str, int] = {}

    def kill(self) -> None:
        self.life += 1
        self._known = Origins()
        self.up_at_s = self._free_at_s = self._clock.now_s + self.costs.restart_s

    def stall(self) -> None:
        """From now on the sidecar commits nothing."""
        self.is_stalled = True

    def go_on(self) -> None:
        self.is_stalled = False
        self._commit()

    def serve(self, chunk: Chunk[None], answer: Callable[[dict[str, int] | None], None]) -> None:
        """The host begins when it is free; a kill meanwhile loses the answer, and the rows too if it came before they were published."""
        now_s, life = self._clock.now_s, self.life
        if now_s < self.up_at_s:
            self._clock.at(now_s + 0.01, lambda: answer(None))
            return
        serve_s = self.costs.of_call(chunk.n_bytes)[1] + chunk.n_bytes / self.costs.commit_bandwidth
        self._free_at_s = max(self._free_at_s, now_s) + serve_s

        def taken() -> None:
            self._take(chunk)
            if self._answer(chunk) != _ends_of(chunk):  # it waits for commits, and others wait behind it
                self._free_at_s = max(self._free_at_s, self._clock.now_s + self.costs.deliver_wait_s)
                self._clock.at(self._free_at_s, lambda: answer(self._answer(chunk) if life == self.life else None))
            else:
                answer(self._answer(chunk))

        self._clock.at(self._free_at_s, lambda: taken() if life == self.life else answer(None))

    def _take(self, chunk: Chunk[None]) -> None:
        for part in chunk.parts:
            first = chunk.firsts[part.origin]
            slots = self._slots.setdefault(part.origin, Slots(self._depth))
            if self._known.judge(part.origin, part.number, first) is not Turn.NEXT or not slots.is_free:
                continue
            self._known.take(part.origin, part.number)
            turn = self._sidecar.judge(part.origin, part.number, first)
            self.repeats += turn is Turn.REPEAT
            if turn is Turn.NEXT:
                self._sidecar.take(part.origin, part.number)
                slots.take()
                self._uncommitted.append(part)
                if not self.is_stalled:
                    self._commit()

    def _commit(self) -> None:
        while self._uncommitted:
            part = self._uncommitted.popleft()
            self._slots[part.origin].credit_oldest()
            self._through[part.origin] = part.number
            self.committed_parts += 1
            self.committed_bytes += part.n_bytes

    def _answer(self, chunk: Chunk[None]) -> dict[str, int]:
        """Through which number each origin of it is known to be committed."""
        found = {}
        for origin, first in chunk.firsts.items():
            found[origin] = max(first - 1, min(self._known.last(origin, first), self._through.get(origin, 0)))
        return found


def _ends_of(chunk: Chunk[None]) -> dict[str, int]:
    return {part.origin: part.number for part in chunk.parts}


class Sender:
    """A forwarder whose collectors are as fast as their credits: ``slots`` publishes are uncommitted at most."""

    def __init__(self, clock: Clock, costs: Costs, host: Host, name: str, slots: int, part_bytes: int, delivery: Delivery[None]) -> None:
        self.delivery = delivery
        self.slots = Slots(slots)
        self._clock, self._costs, self._host, self._name = clock, costs, host, name
        self._part_bytes = part_bytes
        self._thread_at_s = self._link_at_s = 0.0
        self._publish()
        self._send()

    def _publish(self) -> None:
        while self.slots.is_free:
            self.delivery.offer(Part(self._name, self.slots.take(), self._part_bytes, None), self._clock.now_s)

    def _send(self) -> None:
        now_s = self._clock.now_s
        while (chunk := self.delivery.next_chunk(now_s)) is not None:
            call_s = self._costs.of_call(chunk.n_bytes)[0] + chunk.n_bytes / self._costs.copy_bandwidth
            self._thread_at_s = max(self._thread_at_s, now_s) + call_s
            self._link_at_s = max(self._link_at_s, self._thread_at_s) + chunk.n_bytes / self._costs.bandwidth
            self._clock.at(self._link_at_s + self._costs.latency_s, self._arrival(chunk))
        if self.delivery.next_at_s() > now_s:
            self._clock.at(self.delivery.next_at_s(), self._send)

    def _arrival(self, chunk: Chunk[None]) -> Callable[[], None]:
        def settle(through: dict[str, int] | None) -> None:
            self._clock.at(self._clock.now_s + self._costs.latency_s, lambda: self._settled(chunk.ordinal, through))

        return lambda: self._host.serve(chunk, settle)

    def _settled(self, ordinal: int, through: dict[str, int] | None) -> None:
        for _ in self.delivery.settle(ordinal, through, self._clock.now_s):
            self.slots.credit_oldest()
        self._publish()
        self._send()


def ingest(
    costs: Costs,
    *,
    senders: int = 1,
    chunk_bytes: int = 1 << 20,
    window: int = 4,
    part_bytes: int = 65536,
    slots: int = 128,
    seconds: float = 2.0,
    kills_s: tuple[float, ...] = (),
    stalled_s: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Bytes a second that ``senders`` forwarders bring to one shard. Shards don't share anything, so this holds for each of many."""
    clock = Clock()
    host = Host(clock, costs)
    made = [Sender(clock, costs, host, f"o{i}", slots, part_bytes, Delivery(window, chunk_bytes)) for i in range(senders)]
    for kill_s in kills_s:
        clock.at(kill_s, host.kill)
    if stalled_s is not None:
        clock.at(stalled_s[0], host.stall)
        clock.at(stalled_s[1], host.go_on)
    steps, seen = [], 0
    for step in range(1, 41):
        clock.run(seconds * step / 40)
        steps.append([clock.now_s, (host.committed_bytes - seen) * 40 / seconds])
        seen = host.committed_bytes
    sent_again = sum(sender.delivery.parts_sent_again for sender in made)
    return {
        "mib_per_s": host.committed_bytes / seconds / 2**20,
        "parts": host.committed_parts,
        "parts_sent_again": sent_again,
        "refused_repeats": host.repeats,
        "published_parts": sum(sender.slots.credits.taken for sender in made),
        "bytes_per_s_over_time": steps,
    }


def sample(
    costs: Costs,
    shards: int,
    *,
    n: int = 4096,
    total_rows: float = 1e10,
    row_bytes: int = 256,
    batches: int = 100,
    full: float = 1.0,
    fill_rows_per_s: float = 0.0,
    lose_share: float = 0.0,
    prefetch: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """Batches of a learner of ``shards``: seconds each, and how far from uniform over the union the draws were.

    ``error_bound``: half the sum of |share known - share true|, the most by which any event's probability may be off. ``drawn_error``: the
    same of the rows really drawn over all batches, beside what chance alone gives (``chance``).
    """
    rng = np.random.default_rng(seed)
    capacity = rng.uniform(0.5, 1.5, shards)
    capacity = np.floor(capacity / capacity.sum() * total_rows)
    true = np.floor(capacity * full * rng.uniform(0.5, 1.0, shards)) if fill_rows_per_s else capacity.copy()
    names = [f"s{i}" for i in range(shards)]
    router = Router(names, seed=seed)
    for name, size in zip(names, true, strict=True):
        router.report(name, generation=1, size_rows=int(size))
    alive = np.ones(shards, bool)
    now_s, took, bounds, drawn, ideal, epochs = 0.0, [], [], np.zeros(shards), np.zeros(shards), [router.epoch]
    timeline = []
    for batch in range(batches):
        counts = router.draw(n)
        cost_s = _batch_s(costs, counts.rows, row_bytes)
        if lose_share and batch == batches // 2:
            gone = rng.choice(shards, max(1, int(shards * lose_share)), replace=False)
            alive[gone] = False
            counts = router.redraw(counts, [names[i] for i in gone])
            cost_s += costs.notice_s + _batch_s(costs, [counts.rows[i] // 2 for i in range(shards)], row_bytes)
        shares = np.where(alive, true, 0) / true[alive].sum()
        known = np.array(counts.sizes, float)
        bounds.append(0.5 * np.abs(known / known.sum() - shares).sum())
        drawn += counts.rows
        ideal += n * shares
        now_s += cost_s
        took.append(cost_s)
        timeline.append([now_s, n / cost_s])
        true = np.minimum(capacity, true + fill_rows_per_s * rng.uniform(0, 2, shards) * cost_s)
        for i in np.flatnonzero(np.array(counts.rows) > 0):
            if alive[i]:
                router.report(names[i], generation=1, size_rows=int(true[i]))
        epochs.append(router.epoch)
    present = ideal > 0
    chance = math.sqrt(2 / math.pi) * 0.5 * np.sqrt(ideal[present] * (1 - ideal[present] / ideal.sum())).sum() / ideal.sum()
    return {
        "shards": shards,
        "total_rows": total_rows,
        "n": n,
        "ms_per_batch": float(np.median(took) * 1e3),
        "rows_per_s": n / float(np.median(took)),
        "slowest_batch_s": max(took),
        "error_bound": max(bounds),
        "mean_error_bound": float(np.mean(bounds)),
        "drawn_error": float(0.5 * np.abs(drawn - ideal).sum() / ideal.sum()),
        "chance": float(chance),
        "rows_of_lost_after": int(drawn[~alive].sum()) if not lose_share else None,
        "epochs": epochs[-1],
        "rows_per_s_over_time": timeline,
    }


def _batch_s(costs: Costs, rows: Any, row_bytes: int) -> float:
    """All shards asked one after the other by one thread, each serving at once; answers share the learner's link."""
    asked = sum(1 for k in rows if k)
    most = max(rows)
    call_s, serve_s = costs.of_call(0)  # a request is small
    answered_s = 2 * costs.latency_s + serve_s + most * costs.row_s
    return max(asked * call_s, sum(rows) * row_bytes / costs.bandwidth) + answered_s


def check(measured: dict[str, Any]) -> list[dict[str, float]]:
    """The model with fitted costs beside each measurement."""
    costs, rows = Costs.fitted(measured), []
    for run in measured["carried"]:
        model = ingest(costs, chunk_bytes=run["chunk_bytes"], window=run["window"], seconds=1.0)
        rows.append({"chunk_bytes": run["chunk_bytes"], "window": run["window"], "measured_mib_per_s": run["mib_per_s"],
                     "model_mib_per_s": model["mib_per_s"], "ratio": model["mib_per_s"] / run["mib_per_s"]})  # fmt: skip
    for run in measured["batches"]:
        if not run["prefetch"]:
            model_ms = run["shards"] * _batch_s(costs, [run["n"] // run["shards"]], measured["row_bytes"]) * 1e3
            rows.append({"shards": run["shards"], "n": run["n"], "measured_ms": run["ms_per_batch"], "model_ms": model_ms,
                         "ratio": model_ms / run["ms_per_batch"]})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, help="what scripts/bench_ray.py wrote: costs are fitted to it and compared with it")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000])
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder for simulate_scale.json and .png")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    costs = Costs()
    if options.measured:
        measured = json.loads(options.measured.read_text())
        fitted = Costs.fitted(measured)
        result["fitted"], result["check"] = asdict(fitted), check(measured)
        for row in result["check"]:
            print({key: round(value, 2) for key, value in row.items()})
        costs = replace(fitted, latency_s=costs.latency_s, bandwidth=costs.bandwidth)  # these a loopback does not tell
    result["costs"] = asdict(costs)
    result["sampling"] = [sample(costs, s, batches=options.batches) for s in options.shards]
    filling = [s for s in options.shards if s > 1]
    result["filling"] = [sample(costs, s, batches=options.batches, full=0.2, fill_rows_per_s=1e10 / s / 30) for s in filling]
    result["losing"] = [sample(costs, s, batches=options.batches, lose_share=0.1) for s in filling]
    result["ingest_by_latency"] = [
        {"latency_s": latency, "window": w, "chunk_bytes": c, **_brief(ingest(replace(costs, latency_s=latency), window=w, chunk_bytes=c))}
        for latency in (2e-5, 1e-4, 1e-3, 1e-2) for w in (1, 4, 16) for c in (1 << 16, 1 << 20, 1 << 22)
    ]  # fmt: skip
    result["ingest_by_senders"] = [{"senders": k, **_brief(ingest(costs, senders=k))} for k in (1, 2, 4, 8, 16, 32, 64)]
    result["ingest_killed"] = ingest(costs, seconds=12.0, kills_s=(2.0, 5.0))
    result["ingest_stalled"] = ingest(costs, seconds=12.0, stalled_s=(3.0, 7.0))
    for row in result["sampling"]:
        print({key: row[key] for key in ("shards", "ms_per_batch", "rows_per_s", "drawn_error", "chance")})
    if options.out:
        (options.out / "simulate_scale.json").write_text(json.dumps(result) + "\n")
        plot(result, options.out / "simulate_scale.png")


def _brief(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if not key.endswith("over_time")}


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8.4))
    shards = [row["shards"] for row in result["sampling"]]
    axes[0, 0].loglog(shards, [row["rows_per_s"] for row in result["sampling"]], "o-", label="batches of 4,096")
    axes[0, 0].set(xlabel="shards (10^10 rows together)", ylabel="rows / s", title="Throughput: a learner's rows")
    for window in (1, 4, 16):
        runs = [run for run in result["ingest_by_latency"] if run["window"] == window and run["chunk_bytes"] == 1 << 20]
        axes[0, 1].semilogx(
            [run["latency_s"] * 1e3 for run in runs], [run["mib_per_s"] for run in runs], "o-", label=f"{window} on their way"
        )
    axes[0, 1].set(xlabel="ms each way", ylabel="MiB / s", title="Throughput: one forwarder into a shard, chunks of 1 MiB", ylim=(0, None))
    for key, label in (("drawn_error", "drawn, full rings"), ("chance", "chance alone")):
        axes[0, 2].loglog(shards, [row[key] for row in result["sampling"]], "o-" if key == "drawn_error" else "--", label=label)
    filling = [run["shards"] for run in result["filling"]]
    axes[0, 2].loglog(filling, [run["error_bound"] for run in result["filling"]], "s-", label="bound while filling")
    axes[0, 2].set(xlabel="shards", ylabel="total variation", title="Sampling error: distance from uniform over the union")
    for key, label in (("ingest_killed", "host killed after 2 and 5 s"), ("ingest_stalled", "sidecar commits nothing from 3 to 7 s")):
        times, rates = zip(*result[key]["bytes_per_s_over_time"], strict=True)
        axes[1, 0].plot(times, [rate / 2**20 for rate in rates], label=label)
    axes[1, 0].set(xlabel="s", ylabel="MiB / s", title="Recovery: into a shard")
    for run in result["losing"]:
        if run["shards"] in (8, 64, 512):
            times, rates = zip(*run["rows_per_s_over_time"], strict=True)
            axes[1, 1].loglog(times, rates, ".-", label=f"{run['shards']} shards")
    axes[1, 1].set(xlabel="s", ylabel="rows / s", title="Recovery: a learner, a tenth of the shards lost half-way")
    lost = [run["shards"] for run in result["losing"]]
    axes[1, 2].semilogx(lost, [run["slowest_batch_s"] for run in result["losing"]], "o-", label="the batch that met the loss")
    axes[1, 2].semilogx(lost, [run["ms_per_batch"] / 1e3 for run in result["losing"]], "--", label="the others")
    axes[1, 2].set(xlabel="shards, a tenth of them lost at once", ylabel="s", title="Recovery: what the loss costs a learner")
    axes[1, 0].set_ylim(0, 220)
    for axis in axes.flat:
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
