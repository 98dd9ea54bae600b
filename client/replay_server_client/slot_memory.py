"""The memory of one session's slots, and who fills a slot of it: the host, or a GPU once there were rows on one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from replay_server_protocol.messages import SegmentLent
from replay_server_protocol.segment import Segment

from replay_server_client.connection import Connection
from replay_server_client.slot_plan import SlotPlan
from replay_server_client.slot_writer import SlotWriter

if TYPE_CHECKING:
    from replay_server_client.device_rows import Device, DeviceSlot, DeviceSlots


class SlotMemory:
    """A writer for each slot, and the bytes of its rows. Knows nothing of whose turn it is."""

    def __init__(self, connection: Connection, lent: SegmentLent, plan: SlotPlan) -> None:
        """Maps the segment. Raises ProtocolViolation if it can't be what was lent, ServerGone if it went with its server."""
        self._plan = plan
        self._depth = lent.depth
        self._stride = plan.schema.stride
        with connection.opening_memory():
            self._segment = Segment.open(lent.segment, lent.depth * lent.slot_bytes)
        self._slots = self._segment.bytes.reshape(lent.depth, lent.slot_bytes)[:, : lent.slot_rows * self._stride]
        self._writers = [SlotWriter(i, each.reshape(lent.slot_rows, self._stride), plan) for i, each in enumerate(self._slots)]
        self._on_device: DeviceSlots | None = None

    def writer(self, index: int, device: Device | None) -> SlotWriter | DeviceSlot:
        """What fills slot ``index`` with rows of ``device``, or of the host: of that only once all slots before it were handed over."""
        if device is None:
            self.take_cuts()
            return self._writers[index]
        if self._on_device is None:
            from replay_server_client.device_rows import DeviceSlots

            self._on_device = DeviceSlots(device, self._segment.bytes, self._plan, self._depth)
        return self._on_device.slots[index]

    def rows(self, index: int, n: int) -> npt.NDArray[np.uint8]:
        """The bytes of the first ``n`` rows of slot ``index``, where they lie; that memory lasts as long as what is returned."""
        found: npt.NDArray[np.uint8] = self._slots[index, : n * self._stride]
        return found

    def copy_in(self, index: int, rows: npt.NDArray[np.uint8]) -> None:
        """Slot ``index`` begins with these bytes."""
        self._slots[index, : len(rows)] = rows

    def wait_for_copies(self) -> None:
        """Waits for what a GPU has still to copy. It can fill no more slots here."""
        if self._on_device is not None:
            self._on_device.release()

    def take_cuts(self) -> None:
        """The cuts that rows from a GPU left when they were handed over hold for the next rows, whoever writes them."""
        left = self._on_device.settled.take() if self._on_device is not None else None
        if left is not None:
            self._plan.chains.cut(left)

    def close(self) -> None:
        """Lets go of the segment, once no copy into it is under way. Safe to call twice."""
        self.wait_for_copies()
        self._on_device = None
        self._writers.clear()
        self._slots = np.empty((0, 0), np.uint8)
        self._segment.close()
