"""Rows on the GPU: packed on the device, copied into their slot without the caller waiting, handed over once the copy was seen done.

```
caller's stream   simulate │ pack fields into staging[slot] │ simulate …
copy stream                                         └─ wait ─► staging ─► slot, event        one copy of rows a slot
caller's thread   write ──► (returns)       … a later call sees the event: mask, checks, publish
```

No call waits for the device but ``release``, after which the slots' memory may go. What needs the rows' values (masks, the non-finite
policy, moments, links) happens on the host when a slot is handed over, by the same code as for rows that were never on a GPU.
Imported with the first CUDA tensor only: this file and nothing else of the collector's side knows torch.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from replay_server_protocol.errors import DeviceError, RowsRejected
from replay_server_protocol.schema import CASTS, DTYPES, PlacedField, Schema
from torch import Tensor

from replay_server_client.policy_version import PolicyVersion
from replay_server_client.rows import Array, Bools, RowReader, Stamp, as_array, version_array
from replay_server_client.slot_plan import LaneChains, SlotPlan
from replay_server_client.slot_writer import Filled, SlotWriter


class Device(Protocol):
    """What is asked of a GPU. All work is queued; only ``synchronize`` waits."""

    @property
    def name(self) -> torch.device: ...

    def upload(self, array: Array) -> Tensor:
        """A copy of a host array, on the caller's stream."""

    def allocate(self, *shape: int) -> Tensor:
        """Zeroed ``uint8[shape]`` on the device."""

    def allocate_pinned(self, n: int) -> Tensor:
        """``bool[n]`` in host memory that copies reach without the host's help."""

    def pin(self, memory: Tensor) -> None:
        """Registers the segment; where that fails it warns, and copies into it make the caller wait."""

    def unpin(self, memory: Tensor) -> None: ...

    def follow(self) -> None:
        """Orders later copies after what the caller has queued on its current stream."""

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], bool]:
        """Queues copies (to, from) and returns what says whether they are done; that raises DeviceError if the device failed."""

    def synchronize(self) -> None:
        """Waits for all copies."""


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """The rows of one ``write``, on the device, finals in place. Which rows ``mask`` keeps is not known to the host yet."""

    rows: int
    tensors: tuple[Tensor, ...]
    mask: Tensor | None
    device: Device


class DeviceReader(RowReader):
    """Turns mappings that hold CUDA tensors into blocks; host arrays among them are copied to the device."""

    def __init__(self, schema: Schema, lanes: int, device: Device, policy: PolicyVersion | None = None) -> None:
        super().__init__(schema, lanes, policy)
        self._device = device

    def read_device(
        self, rows: Mapping[str, object], mask: object = None, final_mask: object = None, final: Mapping[str, object] | None = None
    ) -> DeviceBlock:
        """The block of ``rows``. Raises RowsRejected naming the field and what would be right."""
        given = self._named(rows)
        tensors = [self._tensor(field, given[field.name]) for field in self.schema]
        n = self._leading(tuple(tensors[self._first].shape))
        if self._is_to_stamp(given):
            tensors[self._stamp_index] = tensors[self._stamp_index].expand(n)
        for field, tensor in zip(self.schema, tensors, strict=True):
            if tensor.shape != (n, *field.shape):
                raise self._misshapen(field, tuple(tensor.shape), n)
        if (final_mask is None) != (final is None):
            raise RowsRejected("final and final_mask go together: which rows end, and what stands in them then")
        if final is not None:
            self._patch(tensors, self._mask("final_mask", final_mask, n), self._named_final(final))
        return DeviceBlock(n, tuple(tensors), None if mask is None else self._mask("mask", mask, n), self._device)

    def _patch(self, tensors: list[Tensor], ends: Tensor, final: Mapping[str, object]) -> None:
        for name, value in final.items():
            index = self._index_of[name]
            rows, tensor = tensors[index], self._tensor(self.schema[name], value, "final ")
            if tensor.shape != rows.shape:
                raise self._misshapen_final(name, tuple(tensor.shape), len(ends))
            tensors[index] = torch.where(ends.reshape(-1, *(1,) * (rows.ndim - 1)), tensor.to(rows.dtype), rows)

    def _tensor(self, field: PlacedField, value: object, what: str = "") -> Tensor:
        """``value`` on the device, of the field's dtype or of one that is cast where it is packed."""
        if type(value) is Stamp:
            version = int(version_array(value, field.numpy_dtype))
            return torch.full((), version, dtype=getattr(torch, field.dtype), device=self._device.name)
        try:
            tensor = self._on_device(value)
        except TypeError as error:
            raise RowsRejected(f"{what}field {field.name!r}: {error}", field=field.name) from error
        dtype = _name_of(tensor.dtype)
        if dtype == field.dtype:
            return tensor
        if field.dtype == "bfloat16" and dtype == "uint16":
            return tensor.view(torch.bfloat16)
        if dtype == "int64" and field.cast:
            words = f"int64 can't be checked to fit {field.dtype} without waiting for the GPU; convert it with .to(torch.{field.dtype})"
        elif field.cast and dtype in CASTS.get(field.dtype, ()):
            return tensor
        else:
            words = f"dtype {dtype}, must be {field.dtype}; convert it with .to(torch.{field.dtype})"
        raise RowsRejected(f"{what}field {field.name!r}: {words}", field=field.name)

    def _mask(self, what: str, mask: object, n: int) -> Tensor:
        try:
            tensor = self._on_device(mask)
        except TypeError as error:
            raise RowsRejected(f"{what}: {error} of bool[{n}]") from error
        if tensor.dtype != torch.bool or tensor.shape != (n,):
            raise RowsRejected(f"{what}: {_name_of(tensor.dtype)}{list(tensor.shape)}, must be bool[{n}], one value a row")
        return tensor

    def _on_device(self, value: object) -> Tensor:
        """Raises TypeError, saying what ``value`` is instead."""
        here = self._device.name
        if isinstance(value, Tensor) and value.device.type != "cpu" and value.device != here:
            raise TypeError(f"a tensor on {value.device}, but this collector's other rows lie on {here}; move it there")
        if isinstance(value, Tensor) and value.device == here:
            return value.detach()
        array, dtype = as_array(value)
        if not array.dtype.isnative or array.dtype.name not in DTYPES:
            raise TypeError(f"dtype {dtype}, must be one of {', '.join(DTYPES)}")
        tensor = self._device.upload(array)
        return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


@dataclass(slots=True)
class _Claim:
    """Rows placed and not yet counted by lanes: their chains depend on what the mask and the policy drop before them."""

    rows: int
    cut: Bools | None


@dataclass(slots=True)
class _Staging:
    """Memory beside one slot: ``rows`` and ``kept`` (the mask, bytes) on the device, ``slot`` and ``landed`` where copies end."""

    rows: Tensor
    kept: Tensor
    slot: Tensor
    landed: Tensor


class DeviceSlot:
    """Fills one slot from the device; stands where a SlotWriter stands. ``rows`` counts the rows placed, masked ones among them."""

    def __init__(
        self, writer: SlotWriter, staging: _Staging, schema: Schema, device: Device, placed: LaneChains, settled: LaneChains
    ) -> None:
        self.index = writer.index
        self.device = device
        self.rows = 0
        self._writer = writer
        self._staging = staging
        self._views = tuple(_field_view(staging.rows, each) for each in schema)
        self._placed, self._settled = placed, settled
        self._claims: list[_Claim] = []
        self._is_masked = False
        self._is_copied: Callable[[], bool] = lambda: True

    @property
    def is_full(self) -> bool:
        return len(self._staging.rows) - self.rows < self._placed.lanes

    @property
    def is_settled(self) -> bool:
        """Whether the sealed slot's bytes were seen in it. Raises DeviceError when the device failed."""
        return self._is_copied()

    def reset(self) -> None:
        self.rows, self._is_masked = 0, False
        self._claims.clear()

    def place(self, block: DeviceBlock, start: int) -> int:
        """Packs whole steps of ``block`` from its row ``start`` on, as many as fit, on the caller's stream. Returns how many."""
        lanes, at = self._placed.lanes, self.rows
        n = min(block.rows - start, (len(self._staging.rows) - at) // lanes * lanes)
        for view, tensor in zip(self._views, block.tensors, strict=True):
            view[at : at + n].copy_(tensor[start : start + n])
        self._keep(at, n, None if block.mask is None else block.mask[start : start + n])
        self.device.follow()
        self._claims.append(_Claim(n, self._placed.take()))
        self.rows = at + n
        return n

    def seal(self) -> None:
        """Queues the one copy of the slot's rows, and of their mask if there is one."""
        staging, n = self._staging, self.rows
        copies = [(staging.slot[:n], staging.rows[:n])]
        if self._is_masked:
            copies.append((staging.landed[:n], staging.kept[:n].view(torch.bool)))
        self._is_copied = self.device.copy(copies)

    def finish(self) -> Filled:
        """As that of a SlotWriter, on the slot's own bytes; only once ``is_settled``."""
        writer = self._writer
        writer.reset()
        kept: Bools | None = self._staging.landed[: self.rows].numpy() if self._is_masked else None
        if kept is not None and kept.all():
            kept = None
        if kept is not None:
            slot: npt.NDArray[np.uint8] = self._staging.slot.numpy()
            slot[: int(kept.sum())] = slot[: self.rows][kept]
        start = 0
        for claim in self._claims:
            if claim.cut is not None:
                self._settled.cut(claim.cut)
            writer.claim(claim.rows, None if kept is None else kept[start : start + claim.rows])
            start += claim.rows
        return writer.finish()

    def _keep(self, at: int, n: int, mask: Tensor | None) -> None:
        kept = self._staging.kept
        if mask is not None and not self._is_masked:
            self._is_masked = True
            kept[:at].fill_(1)
        if mask is not None:
            kept[at : at + n].copy_(mask)
        elif self._is_masked:
            kept[at : at + n].fill_(1)


class DeviceSlots:
    """All slots of one session as the device fills them. ``settled`` holds the cuts that handing over leaves for the next rows.

    Cuts wait with the rows before them: ``placed`` (the collector's chains) are cut by the caller as it writes, ``settled`` as slots are
    handed over, where dropped rows cut too.
    """

    def __init__(self, device: Device, memory: npt.NDArray[np.uint8], plan: SlotPlan, depth: int) -> None:
        """``memory`` is the whole segment, ``uint8[depth × slot_bytes]``."""
        self.settled = LaneChains(plan.lanes)
        schema, slot_rows, segment = plan.schema, plan.slot_rows, torch.from_numpy(memory)
        own_plan = plan.with_chains(self.settled)
        self.slots = []
        for index, (slot, in_host) in enumerate(zip(segment.view(depth, -1), memory.reshape(depth, -1), strict=True)):
            n_bytes = slot_rows * schema.stride
            writer = SlotWriter(index, in_host[:n_bytes].reshape(slot_rows, schema.stride), own_plan)
            staging = _Staging(
                device.allocate(slot_rows, schema.stride),
                device.allocate(slot_rows),
                slot[:n_bytes].view(slot_rows, schema.stride),
                device.allocate_pinned(slot_rows),
            )
            self.slots.append(DeviceSlot(writer, staging, schema, device, plan.chains, self.settled))
        device.pin(segment)
        self.release = weakref.finalize(self, _let_go, device, segment)
        """Waits for the copies in flight and unregisters the segment, which may be unmapped then. Runs by itself at the latest at exit."""


class CudaDevice:
    """Device by torch and one registration by cuda-bindings (torch has no call that clears a failed one's error)."""

    def __init__(self, name: torch.device) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise DeviceError(
                f"rows on {name} need the package cuda-bindings, which can't be imported ({error}); "
                "install it with: pip install 'replay-server[cuda]', or write tensor.cpu()"
            ) from error
        self.name = name
        self._cuda: Any = runtime
        self._stream = torch.cuda.Stream(name)

    def upload(self, array: Array) -> Tensor:
        pinned = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), pin_memory=True)
        pinned.numpy()[...] = array
        return pinned.to(self.name, non_blocking=True)

    def allocate(self, *shape: int) -> Tensor:
        with torch.cuda.stream(self._stream):
            memory = torch.zeros(shape, dtype=torch.uint8, device=self.name)
        self._stream.synchronize()  # waits for the zeros alone: whatever stream packs first finds them
        return memory

    def allocate_pinned(self, n: int) -> Tensor:
        return torch.empty(n, dtype=torch.bool, pin_memory=True)

    def pin(self, memory: Tensor) -> None:
        with torch.cuda.device(self.name):
            (code,) = self._cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, self._cuda.cudaHostRegisterPortable)
            if code != 0:
                self._cuda.cudaGetLastError()  # it stays pending otherwise, and torch's next call raises it
                warnings.warn(
                    f"the slots can't be pinned (cudaHostRegister: {code.name}), so writes of CUDA tensors wait for their copies; "
                    "see ulimit -l",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def unpin(self, memory: Tensor) -> None:
        with torch.cuda.device(self.name):
            (code,) = self._cuda.cudaHostUnregister(memory.data_ptr())
            if code != 0:  # it never was registered, which pin has told
                self._cuda.cudaGetLastError()

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.name))

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], bool]:
        with torch.cuda.stream(self._stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
        return partial(_is_done, self._stream.record_event())

    def synchronize(self) -> None:
        self._stream.synchronize()


def _is_done(event: torch.Event) -> bool:
    try:
        return event.query()
    except RuntimeError as error:
        raise DeviceError(f"the GPU failed before rows were copied from it: {error}; restart this process") from error


def _let_go(device: Device, segment: Tensor) -> None:
    try:
        device.synchronize()
        device.unpin(segment)
    except RuntimeError as error:  # the context is lost, and with it every copy that could still write
        warnings.warn(f"the GPU failed while rows were copied from it: {error}", RuntimeWarning, stacklevel=2)


def _field_view(rows: Tensor, field: PlacedField) -> Tensor:
    kind: torch.dtype = getattr(torch, field.dtype)
    return rows[:, field.offset : field.end].view(kind).view(len(rows), *field.shape)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
