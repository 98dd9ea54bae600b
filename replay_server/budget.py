"""The memory plan: what the ring and the slots will take, counted and compared with what is free before anything large is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from replay_server_protocol.errors import BudgetExceeded, InvalidRequest
from replay_server_protocol.schema import Schema
from replay_server_protocol.segment import PAGE_BYTES, align, segment_dir

from replay_server import cgroup
from replay_server.config import ServerConfig, Size, default_headroom, slot_rows_for
from replay_server.storage import PROOF_BYTES, PROOF_CELLS, RingLayout

DEVICE_RESERVE_BYTES = 512 << 20
"""Left free on a GPU: contexts, the learner's own allocator's slack."""

HOST_RESERVE_BYTES = 64 << 20
"""Left free in host memory."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Rows and bytes of one ring and of one collector's slots."""

    capacity: int
    headroom: int
    layout: RingLayout
    row_bytes: int
    slot_rows: int
    slot_bytes: int
    depth: int
    max_collectors: int
    is_on_device: bool

    @classmethod
    def of(cls, config: ServerConfig, schema: Schema, lanes: int, *, is_on_device: bool) -> MemoryPlan:
        """Counts everything; allocates nothing. Raises InvalidRequest when the options don't fit each other."""
        slot_rows = slot_rows_for(config, lanes)
        overlay_stride = schema.overlay.stride if schema.overlay else 0
        row_total = schema.stride + 8 * len(config.columns) + overlay_stride
        capacity, headroom = _rows_of(config, slot_rows, row_total)
        if headroom < slot_rows:
            raise InvalidRequest(f"--headroom {headroom:,} is below the {slot_rows:,} rows of a slot: no slot would ever fit")
        if config.learning_starts > capacity:
            raise InvalidRequest(f"--learning-starts {config.learning_starts:,} is above the capacity of {capacity:,} rows")
        layout = RingLayout.of(
            capacity + headroom,
            schema.stride,
            has_link="link" in config.columns,
            has_priority="priority" in config.columns,
            overlay_stride=overlay_stride,
        )
        slot_bytes = align(slot_rows * schema.stride)
        return cls(capacity, headroom, layout, schema.row_bytes, slot_rows, slot_bytes, config.depth, config.max_collectors, is_on_device)

    @property
    def ring_bytes(self) -> int:
        return self.layout.alloc_bytes

    @property
    def ingress_bytes(self) -> int:
        """Of one collector."""
        return self.depth * self.slot_bytes

    def check(self, free_device_bytes: int | None, free_host_bytes: int) -> None:
        """Raises BudgetExceeded, with what is needed, what is free and what would fit, before anything is allocated.

        The ring and the first collector's slots are checked each on its own; in host memory they share what is free.
        """
        usable_bytes = free_host_bytes
        if self.is_on_device and free_device_bytes is not None:
            self._check_ring(free_device_bytes - DEVICE_RESERVE_BYTES, "the GPU", "--storage host keeps the ring in host memory")
        else:
            self._check_ring(free_host_bytes - HOST_RESERVE_BYTES, f"host memory ({segment_dir()})", "enlarge /dev/shm")
            usable_bytes -= self.ring_bytes
        check_slots(self.depth, self.slot_bytes, self.layout.stride, usable_bytes)

    def _check_ring(self, usable_bytes: int, where: str, remedy: str) -> None:
        if self.ring_bytes <= usable_bytes:
            return
        row_total = self.layout.bytes_per_row
        beside_rows = row_total + PROOF_CELLS * PROOF_BYTES + 2 * PAGE_BYTES  # spare records, the proof cells and what alignment may take
        fits = max(0, (usable_bytes - beside_rows) // row_total - self.headroom)
        raise BudgetExceeded(
            f"a ring of {self.capacity:,} + {self.headroom:,} rows needs {self.ring_bytes:,} bytes, {max(0, usable_bytes):,} of {where} "
            f"can be used; a --capacity of {fits:,} would fit, or: {remedy}",
            needed_bytes=self.ring_bytes,
            free_bytes=max(0, usable_bytes),
            fits_rows=fits,
        )

    def lines(self) -> list[str]:
        """The plan as ``--dry-run`` prints it."""
        where = "device" if self.is_on_device else "host"
        return [
            f"row      {self.row_bytes:,} bytes of fields, {self.layout.stride:,} in memory",
            f"ring     {self.capacity:,} rows of capacity + {self.headroom:,} of headroom = {self.ring_bytes:,} bytes of {where} memory",
            f"slots    {self.depth} x {self.slot_rows:,} rows = {self.ingress_bytes:,} bytes of host memory a collector",
            f"ingress  at most {self.max_collectors} collectors = {self.max_collectors * self.ingress_bytes:,} bytes of host memory",
        ]


def check_slots(depth: int, slot_bytes: int, stride: int, free_host_bytes: int) -> None:
    """Raises BudgetExceeded if a collector's slots don't fit what is free in host memory, less the reserve; it names slots that would."""
    n_bytes, usable_bytes = depth * slot_bytes, max(0, free_host_bytes - HOST_RESERVE_BYTES)
    if n_bytes > usable_bytes:
        fits = usable_bytes // depth // PAGE_BYTES * PAGE_BYTES // stride
        raise BudgetExceeded(
            f"the slots of one collector need {n_bytes:,} bytes of {segment_dir()}, {usable_bytes:,} can be used there; "
            f"with --depth {depth} a --slot-rows of {fits:,} would fit; or a smaller --depth, or enlarge it",
            needed_bytes=n_bytes,
            free_bytes=usable_bytes,
            fits_rows=fits,
        )


def free_host_bytes() -> int:
    """What a new segment may take: the least of the file system's room, the system's available memory and the cgroup's."""
    room = os.statvfs(segment_dir())
    in_group = cgroup.free_memory_bytes()
    return min(room.f_bavail * room.f_frsize, _available_bytes(), *(() if in_group is None else (in_group,)))


def _rows_of(config: ServerConfig, slot_rows: int, row_total: int) -> tuple[int, int]:
    """(capacity, headroom) in rows, also for a capacity given in bytes."""
    if not isinstance(config.capacity, Size):
        return config.capacity, config.headroom or default_headroom(config.capacity, slot_rows)
    ring_rows = config.capacity.n_bytes // row_total
    if config.headroom is not None:
        headroom = config.headroom
    else:
        headroom = max(2 * slot_rows, min(ring_rows // 9, default_headroom(ring_rows, slot_rows)))
    if ring_rows <= headroom:
        raise InvalidRequest(f"--capacity {config.capacity.n_bytes:,} bytes hold {ring_rows:,} rows, the headroom alone needs {headroom:,}")
    return ring_rows - headroom, headroom


def _available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 2**62
