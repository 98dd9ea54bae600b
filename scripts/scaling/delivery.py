"""Publishes on their way from forwarders to one shard, in simulated time: the real Credits, Delivery and Origins."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from replay_server_client.ray.delivery import Chunk, Delivery, Part
from replay_server_protocol.origins import Origins, Turn
from scaling.costs import Costs

from replay_server.credit import Credits


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
