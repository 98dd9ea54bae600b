"""A ring filled from a snapshot, a block a turn of the server's loop, before any client is shown it.

```
file ─► block ─► one half of the bounce segment, as the ring holds rows ─► copies submitted ─► seen complete ─► the half is free again
```

The blocks go through the ring's own memory interface, so a ring on a GPU and one in host memory are filled by the same code.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import numpy as np
from replay_server_protocol.errors import InvalidRequest
from replay_server_protocol.segment import Segment, align, segment_name

from replay_server.replay import Replay, Store
from replay_server.saved.directory import hold
from replay_server.saved.manifest import Manifest
from replay_server.saved.row_arrays import RingBytes, fill
from replay_server.saved.rows import Block, blocks, read_moments
from replay_server.snapshot.capture import restore_state
from replay_server.storage import Copy, RingLayout

log = logging.getLogger("replay_server")

HALF_BYTES = 4 << 20
_HALVES = 2
_ALIGNING_BYTES = 64
_RECORD = np.dtype([("lap", "<i4"), ("priority", "<f4")])


class Restoration:
    """Fills ``store``'s ring; ``step`` until it says that all is there. Rows and state are ready for clients only then."""

    def __init__(self, replay: Replay, store: Store, manifest: Manifest) -> None:
        self.store = store
        self._replay = replay
        self._manifest = manifest
        self._first_seq = max(manifest.tail, manifest.committed - store.ring.capacity)
        self._done_rows = 0
        self._begin_s = time.monotonic()
        layout = store.plan.layout
        self._half_bytes = align(max(HALF_BYTES, layout.bytes_per_row + _ALIGNING_BYTES))
        half_rows = (self._half_bytes - _ALIGNING_BYTES) // layout.bytes_per_row
        with contextlib.ExitStack() as held:
            if not hold(manifest.path, held):
                raise InvalidRequest(f"{manifest.path} is being deleted, as older than those that are kept; restore a newer one")
            self._bounce = _Bounce(replay, store, self._half_bytes)
            held.callback(self._bounce.close)
            self._held = held.pop_all()
        self._tickets = [0] * _HALVES  # by half: the ticket that its last copies belong to
        self._submitted = 0
        self._blocks: Iterator[Block] | None = blocks(manifest, self._first_seq, half_rows)

    @property
    def share(self) -> float:
        rows = self._manifest.committed - self._first_seq
        return self._done_rows / rows if rows else 1.0

    def step(self) -> bool:
        """Copies one block in, if there is room for it; True once all rows are in the ring and were seen there.

        Raises InvalidRequest naming what is damaged, DeviceError.
        """
        completed = self.store.memory.completed()
        if self._blocks is None:
            if completed < self._submitted:
                return False
            self._finish()
            return True
        half = self._submitted % _HALVES
        if completed < self._tickets[half]:
            return False
        block = next(self._blocks, None)
        if block is None:
            self._blocks = None
            return False
        self._submit(half, block)
        self._done_rows += len(block.seqs)
        return False

    def close(self) -> None:
        """Lets go of the files and of the bounce; the ring's memory is its store's."""
        self._held.close()

    def _submit(self, half: int, block: Block) -> None:
        ring, layout, n = self.store.ring, self.store.plan.layout, len(block.seqs)
        places = _places(layout, n)
        into, manifest = _views(self._bounce.half(half), places, n), self._manifest
        fill(block.arrays, manifest.schema, block.seqs, manifest.committed, ring.ring_rows, into, self.store.schema)
        address, copies, row = self._bounce.address(half), [], 0
        for index, rows in ring.pieces(int(block.seqs[0]), n):
            for at, offset, n_bytes in places.values():
                copies.append(Copy(offset + index * n_bytes, address + at + row * n_bytes, rows * n_bytes))
            row += rows
        self.store.memory.submit(copies)
        self._submitted += 1
        self._tickets[half] = self._submitted

    def _finish(self) -> None:
        manifest, store = self._manifest, self.store
        restore_state(self._replay, store, manifest.state, read_moments(manifest))
        counters = self._replay.counters
        self._replay.rates.begin(time.monotonic(), counters.rows_committed, counters.batches_granted)
        store.ring.restore(self._first_seq, manifest.committed)
        store.ingress.begin_after(self._submitted)
        log.info(
            "restored %s rows, seq %d to %d, from %s in %.1f s; %s rows of its window don't fit this capacity",
            f"{manifest.committed - self._first_seq:,}",
            self._first_seq,
            manifest.committed,
            manifest.path,
            time.monotonic() - self._begin_s,
            f"{self._first_seq - manifest.tail:,}",
        )


class _Bounce:
    """A segment of two halves that the ring's memory copies from."""

    def __init__(self, replay: Replay, store: Store, half_bytes: int) -> None:
        self._memory = store.memory
        self._half_bytes = half_bytes
        self._segment = Segment.create(segment_name(replay.directory.run_id, "restore"), _HALVES * half_bytes)
        self._segment.unlink()
        self._memory.register(self._segment)

    def half(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self._segment.bytes[number * self._half_bytes : (number + 1) * self._half_bytes]

    def address(self, number: int) -> int:
        return self._segment.address + number * self._half_bytes

    def close(self) -> None:
        self._memory.unregister(self._segment)
        self._segment.close()


def _places(layout: RingLayout, n: int) -> dict[str, tuple[int, int, int]]:
    """(place in the half, offset in the ring's allocation, bytes of a row) of the rows and of each column, for n rows."""
    offsets = {"rows": 0, **layout.columns}
    row_bytes = {"rows": layout.stride, "link": 8, "priority": 8, "overlay": layout.overlay_stride}
    at, places = 0, {}
    for name, offset in offsets.items():
        places[name] = (at, offset, row_bytes[name])
        at = align(at + n * row_bytes[name], 16)
    return places


def _views(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], places: dict[str, tuple[int, int, int]], n: int) -> RingBytes:
    column = {name: memory[at : at + n * n_bytes].reshape(n, n_bytes) for name, (at, _, n_bytes) in places.items()}
    link, priority = column.get("link"), column.get("priority")
    return RingBytes(
        column["rows"],
        link.view(np.int64).reshape(-1) if link is not None else None,
        priority.view(_RECORD).reshape(-1) if priority is not None else None,
        column.get("overlay"),
    )
