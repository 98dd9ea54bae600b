"""Rows as a caller gives them, checked against the schema before a byte is written.

Nothing is cast in silence: a field of another dtype or shape is refused by name, with what would be right; ``Field(cast=True)``
declares the safe casts. Tensors of torch are known by their type's name alone, so that a collector never imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from replay_server_protocol.errors import RowsRejected, shown
from replay_server_protocol.schema import CASTS, MOST_NESTED, PlacedField, Schema

from replay_server_client.policy_version import PolicyVersion

Array = npt.NDArray[np.generic]
Bools = npt.NDArray[np.bool_]

_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """The rows of one ``write``, all checks passed: time-major over all lanes, exact dtypes, nothing copied that needn't be.

    ``arrays[i]`` is field i as ``dtype[rows, *shape]``. With a mask, ``kept_before[s]`` counts the rows kept before step s.
    ``final`` holds (field's place in the schema, array of full length); only its rows of ``final_mask`` are ever read.
    """

    device: ClassVar[None] = None  # a DeviceBlock's says where it lies
    rows: int
    arrays: tuple[Array, ...]
    mask: Bools | None = None
    kept_before: npt.NDArray[np.int64] | None = None
    final_mask: Bools | None = None
    final: tuple[tuple[int, Array], ...] = ()


class RowReader:
    """Turns mappings of arrays into row blocks of one schema; ``lanes`` rows are one step."""

    def __init__(self, schema: Schema, lanes: int, policy: PolicyVersion | None = None) -> None:
        """Rows without a policy version get that of ``policy``, if the schema has a field for it."""
        self.schema = schema
        self.lanes = lanes
        self._names = frozenset(schema.names)
        self._policy = policy
        self._stamped = schema.roles.get("policy_version") if policy is not None and len(self._names) > 1 else None
        self._given_names = self._names - {self._stamped}
        self._first = 1 if self._stamped == schema.names[0] else 0  # the field that says how many rows there are
        self._index_of = {name: index for index, name in enumerate(schema.names)}
        self._stamp_index = self._index_of[self._stamped] if self._stamped is not None else -1
        self._wanted = tuple((field, field.numpy_dtype, field.shape) for field in schema)

    def read(
        self, rows: Mapping[str, object], mask: object = None, final_mask: object = None, final: Mapping[str, object] | None = None
    ) -> RowBlock:
        """The block of ``rows``. Raises RowsRejected naming the field and what would be right."""
        given = self._named(rows)
        arrays = [_array_of(field, dtype, given[field.name]) for field, dtype, _ in self._wanted]
        n = self._leading(arrays[self._first].shape)
        if self._is_to_stamp(given):
            arrays[self._stamp_index] = np.broadcast_to(arrays[self._stamp_index], n)
        kept = _mask_of("mask", mask, n)
        if kept is not None and kept.all():
            kept = None
        for index, (field, dtype, shape) in enumerate(self._wanted):
            array = arrays[index]
            if array.shape != (n, *shape):
                raise self._misshapen(field, array.shape, n)
            if array.dtype != dtype:
                arrays[index] = _cast(field, array, kept)
        if final_mask is None and final is None:
            return RowBlock(n, tuple(arrays), kept, self._kept_before(kept))
        if final_mask is None or final is None:
            raise RowsRejected("final and final_mask go together: which rows end, and what stands in them then")
        ends = _mask_of("final_mask", final_mask, n)
        return RowBlock(n, tuple(arrays), kept, self._kept_before(kept), ends, self._final(final, ends, n))

    def _is_to_stamp(self, given: Mapping[str, object]) -> bool:
        return self._stamped is not None and type(given[self._stamped]) is Stamp

    def _named(self, rows: Mapping[str, object]) -> Mapping[str, object]:
        if not isinstance(rows, Mapping):
            raise RowsRejected(f"rows must be a mapping of field names to arrays, not {type(rows).__name__}")
        if rows.keys() == self._names:
            return rows
        flat = dict(rows) if rows.keys() == self._given_names else dict(_flatten(rows))
        if self._stamped is not None and self._policy is not None and self._stamped not in flat:
            flat[self._stamped] = Stamp(self._policy.version)
        for name in self.schema.names:
            if name not in flat:
                raise RowsRejected(f"field {name!r} is missing; rows need {', '.join(self.schema.names)}", field=name)
        self._check_known(flat)
        return flat

    def _check_known(self, flat: Mapping[str, object]) -> None:
        for name in flat:
            if name not in self._names:
                words = f"field {shown(name)} is not in the schema, which has {', '.join(self.schema.names)}"
                raise RowsRejected(words, field=shown_name(name))

    def _leading(self, first: tuple[int, ...]) -> int:
        name = self.schema.fields[self._first].name
        if not first:
            raise RowsRejected(f"field {name!r}: a single value; the leading dimension must count rows", field=name)
        n = first[0]
        if n % self.lanes:
            raise RowsRejected(
                f"{n} rows (by field {name!r}) are no whole steps of {self.lanes} lanes: give a multiple of {self.lanes}, time-major "
                "over all lanes, and leave rows out with mask=",
                field=name,
                rows=n,
                lanes=self.lanes,
            )
        return n

    def _misshapen(self, field: PlacedField, shape: tuple[int, ...], n: int) -> RowsRejected:
        if shape and shape[1:] == field.shape:
            words = f"{shape[0]} rows, field {self.schema.fields[self._first].name!r} has {n}; every field needs the same leading dimension"
        else:
            words = f"shape {shape}, must be {(n, *field.shape)}: {n} rows of {field.describe()}"
        return RowsRejected(f"field {field.name!r}: {words}", field=field.name)

    def _kept_before(self, kept: Bools | None) -> npt.NDArray[np.int64] | None:
        if kept is None:
            return None
        counts = kept.reshape(-1, self.lanes).sum(1)
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))

    def _named_final(self, final: Mapping[str, object]) -> Mapping[str, object]:
        flat = dict(_flatten(final))
        self._check_known(flat)
        return flat

    def _misshapen_final(self, name: str, shape: tuple[int, ...], n: int) -> RowsRejected:
        return RowsRejected(
            f"final field {name!r}: shape {shape}, must be {(n, *self.schema[name].shape)}: the full leading dimension, of which only rows "
            "of final_mask are read",
            field=name,
        )

    def _final(self, final: Mapping[str, object], ends: Bools | None, n: int) -> tuple[tuple[int, Array], ...]:
        patches = []
        for name, value in self._named_final(final).items():
            index = self._index_of[name]
            field, dtype, shape = self._wanted[index]
            array = _array_of(field, dtype, value, "final ")
            if array.shape != (n, *shape):
                raise self._misshapen_final(name, array.shape, n)
            patches.append((index, array if array.dtype == dtype else _cast(field, array, ends)))
        return tuple(patches)


class Stamp(int):
    """A version for all rows of one write."""


def on_gpu(rows: object, depth: int = MOST_NESTED) -> object:
    """A CUDA tensor among the values of ``rows``, or None. One lookup where torch was never imported."""
    if "torch" not in sys.modules or not isinstance(rows, Mapping) or not depth:
        return None
    for value in rows.values():
        if type(value) is np.ndarray:  # the usual case, told first: this is on every write's path
            continue
        found = on_gpu(value, depth - 1) if isinstance(value, Mapping) else value
        if getattr(found, "is_cuda", False) is True:
            return found
    return None


def as_array(value: object) -> tuple[Array, str]:
    """``value`` in host memory and the name of its dtype (of schema.DTYPES where it has one), without a copy.

    Takes numpy arrays, CPU tensors of torch and whatever has ``__array__``; bfloat16 comes as its uint16 bits. Raises TypeError,
    saying what it is instead.
    """
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return _of_tensor(value)
    if not hasattr(value, "__array__"):
        raise TypeError(f"a {type(value).__name__}, must be an array")
    array = np.asarray(value)
    dtype = array.dtype
    if dtype.name == "bfloat16":  # of ml_dtypes; numpy itself has none
        return array.view(np.uint16), "bfloat16"
    return array, dtype.name if dtype.isnative else dtype.str


def _of_tensor(value: object) -> tuple[Array, str]:
    device = value.device  # type: ignore[attr-defined]
    if device.type != "cpu":
        raise TypeError(f"a tensor on {device}; slots lie in host memory, so write tensor.cpu()")
    tensor = value.detach()  # type: ignore[attr-defined]
    torch = sys.modules["torch"]  # a tensor exists, so somebody has imported it
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16), "bfloat16"
    array: Array = tensor.numpy()
    return array, array.dtype.name


def _array_of(field: PlacedField, wanted: np.dtype[np.generic], value: object, what: str = "") -> Array:
    """``value`` as an array of the field's dtype or of one that may be cast to it."""
    if type(value) is np.ndarray and value.dtype == wanted:
        return value
    if type(value) is Stamp:
        return version_array(value, wanted)
    try:
        array, dtype = as_array(value)
    except TypeError as error:
        raise RowsRejected(f"{what}field {field.name!r}: {error}", field=field.name) from error
    if dtype == field.dtype or (field.dtype == "bfloat16" and dtype == "uint16"):
        return array
    casts = CASTS.get(field.dtype, ())
    if field.cast and dtype in casts:
        return array
    remedy = f", or declare Field({field.dtype!r}, {field.shape}, cast=True)" if dtype in casts else ""
    raise RowsRejected(f"{what}field {field.name!r}: dtype {dtype}, must be {field.dtype}; convert it{remedy}", field=field.name)


def version_array(version: int, dtype: np.dtype[np.generic]) -> Array:
    """Raises RowsRejected when the version is beyond its field."""
    most = int(np.iinfo(dtype.name).max)
    if version > most:
        raise RowsRejected(f"policy version {version:,} is beyond its field's dtype {dtype.name}, which ends at {most:,}; declare int64")
    return np.array(version, dtype)


def _cast(field: PlacedField, array: Array, read: Bools | None) -> Array:
    """The declared cast; rows that are not ``read`` may hold anything."""
    if array.dtype == np.int64:
        values = array if read is None else array[read]
        if values.size and not (_INT32.min <= values.min() and values.max() <= _INT32.max):
            raise RowsRejected(
                f"field {field.name!r}: values from {values.min()} to {values.max()} don't fit int32 ({_INT32.min} to {_INT32.max}); "
                "declare the field as int64",
                field=field.name,
            )
    with np.errstate(over="ignore", invalid="ignore"):  # a float64 beyond float32 becomes Inf, which the non-finite policy sees
        return array.astype(field.numpy_dtype)


def _mask_of(what: str, mask: object, n: int) -> Bools | None:
    if mask is None:
        return None
    try:
        array, dtype = as_array(mask)
    except TypeError as error:
        raise RowsRejected(f"{what}: {error} of bool[{n}]") from error
    if dtype != "bool" or array.shape != (n,):
        raise RowsRejected(f"{what}: {dtype}{list(array.shape)}, must be bool[{n}], one value a row")
    return array.astype(np.bool_, copy=False)


def _flatten(rows: Mapping[str, object], prefix: str = "", depth: int = MOST_NESTED) -> Iterator[tuple[str, object]]:
    if not isinstance(rows, Mapping) or not depth:
        raise RowsRejected(f"{shown(rows)}: a mapping of field names to arrays, nested at most {MOST_NESTED} deep, is right")
    for name, value in rows.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{shown_name(name)}.", depth - 1)
        else:
            yield f"{prefix}{shown_name(name)}", value


def shown_name(name: object) -> str:
    return name if isinstance(name, str) else shown(name)
