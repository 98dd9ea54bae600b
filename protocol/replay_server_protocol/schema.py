"""The schema: which fields a row has, and where each lies in the row's bytes.

```
row  |obs float32[98]      |action float32[29]|reward|..pad..|done bool|..pad to 16..|
     ^offset 0             ^392               ^508           ^ each field aligned to its item size
     |<------------------------- stride: a multiple of 16 ------------------------->|
```

A multiple of 16 keeps the device's vectorised gather (FastGather in torch ≥ 2.8) and keeps rows aligned for every dtype.
bfloat16 has no numpy dtype: its numpy view is the uint16 of its bits.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, Self, cast

import msgpack  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from replay_server_protocol.errors import SchemaMismatch, shown

ROW_ALIGNMENT_BYTES = 16
MAX_FIELDS = 256
MAX_DIMENSIONS = 8
MAX_ROW_BYTES = 64 << 20

DTYPES: dict[str, str] = {
    "bool": "?",
    "uint8": "u1",
    "uint16": "u2",
    "uint32": "u4",
    "uint64": "u8",
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "float16": "f2",
    "float32": "f4",
    "float64": "f8",
    "bfloat16": "u2",
}
"""Allowed dtype names and the numpy dtype of their bytes."""

CASTS: dict[str, tuple[str, ...]] = {"float32": ("float64", "bool"), "int32": ("int64",)}
"""Target dtype -> source dtypes that ``Field(cast=True)`` allows; int64 to int32 is range checked."""

ROLES = ("reward", "terminated", "truncated", "first", "policy_version")

OVERLAY_LAP = "_lap"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")
_NAME_LENGTH = 64
MOST_NESTED = 32  # a dot for each: deeper names are too long anyway


@dataclass(frozen=True, slots=True)
class Field:
    """What one field of a row holds: ``dtype`` (a name of DTYPES) and ``shape`` per row; ``cast`` allows the safe casts of CASTS,
    ``mutable`` lets learners write newer values back (``Learner.update``)."""

    dtype: str
    shape: int | tuple[int, ...] = ()
    cast: bool = False
    mutable: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.shape, int | tuple | list):
            raise SchemaMismatch(f"shape {shown(self.shape)} must be a whole number or a tuple of them")
        shape = (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise SchemaMismatch(f"dtype {shown(self.dtype)} is not one of {', '.join(DTYPES)}")
        for option, value in (("cast", self.cast), ("mutable", self.mutable)):
            if not isinstance(value, bool):
                raise SchemaMismatch(f"{option}={shown(value)}: True or False")
        if len(shape) > MAX_DIMENSIONS or any(not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_ROW_BYTES for n in shape):
            raise SchemaMismatch(f"shape {shown(shape)} must have at most {MAX_DIMENSIONS} dimensions of 1 to {MAX_ROW_BYTES:,}")
        if self.cast and self.dtype not in CASTS:
            raise SchemaMismatch(f"cast=True has no safe casts to {self.dtype}; it has to {', '.join(CASTS)}")
        object.__setattr__(self, "shape", shape)

    @classmethod
    def of(cls, spec: object) -> Field:
        """A field from ``"float32"``, ``("float32", 98)``, ``("float32", (3, 84, 84))`` or a Field."""
        if isinstance(spec, Field):
            return spec
        if isinstance(spec, str):
            return cls(spec)
        if isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[0], str) and isinstance(spec[1], int | tuple):
            return cls(spec[0], spec[1])
        raise SchemaMismatch(f'field {shown(spec)}: give "dtype", ("dtype", shape) or Field(dtype, shape)')


@dataclass(frozen=True, slots=True)
class PlacedField:
    """A field with its name and its place in the row: ``offset`` and ``n_bytes`` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    cast: bool
    offset: int
    n_bytes: int
    mutable: bool = False

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        return np.dtype(DTYPES[self.dtype])

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.n_bytes

    def view(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.generic]:
        """This field of ``rows`` (``uint8[n, stride]``, rows contiguous) as ``dtype[n, *shape]``, sharing memory."""
        return rows[:, self.offset : self.end].view(self.numpy_dtype).reshape(len(rows), *self.shape)

    def describe(self) -> str:
        return f"{self.dtype}{list(self.shape) if self.shape else ''}"


@dataclass(frozen=True)
class Schema:
    """Ordered fields with their layout, roles and pairs; equal schemas have equal fingerprints.

    ``roles`` maps names of ROLES to field names; ``pairs`` maps a field to the one that holds its next value.
    ``row_bytes`` counts the fields' bytes, ``stride`` what a row takes in memory.
    """

    fields: tuple[PlacedField, ...]
    roles: Mapping[str, str]
    pairs: Mapping[str, str]

    @classmethod
    def of(
        cls,
        fields: Mapping[str, object] | None = None,
        /,
        *,
        roles: Mapping[str, str] | None = None,
        pairs: Mapping[str, str] | None = None,
        **named: object,
    ) -> Self:
        """Lays out fields in the order given, by mapping (nested ones are flattened with dots) or by keyword.

        Roles and pairs default to the names themselves: ``reward``, …; ``next_X`` of ``X``.
        Raises SchemaMismatch naming the field.
        """
        specs: dict[str, object] = {}
        for name, spec in (*_flatten({} if fields is None else fields), *_flatten(named)):
            if name in specs:
                raise SchemaMismatch(f"field {name!r} stands twice", field=name)
            specs[name] = spec
        if not 1 <= len(specs) <= MAX_FIELDS:
            raise SchemaMismatch(f"a schema has 1 to {MAX_FIELDS} fields, this one {len(specs)}")
        placed, offset = [], 0
        for name, spec in specs.items():
            if not _NAME.fullmatch(name) or len(name) > _NAME_LENGTH:
                raise SchemaMismatch(
                    f"field name {shown(name)}: letters, digits and '_', parts joined by '.', at most {_NAME_LENGTH} characters"
                )
            try:
                field = Field.of(spec)
            except SchemaMismatch as error:
                raise SchemaMismatch(f"field {name!r}: {error.message}", field=name) from error
            shape = cast("tuple[int, ...]", field.shape)
            item = np.dtype(DTYPES[field.dtype]).itemsize
            offset = -(-offset // item) * item
            n_bytes = item * math.prod(shape)
            placed.append(PlacedField(name, field.dtype, shape, field.cast, offset, n_bytes, field.mutable))
            offset += n_bytes
            if offset > MAX_ROW_BYTES:
                raise SchemaMismatch(f"field {name!r} brings the row to {offset:,} bytes, the limit is {MAX_ROW_BYTES:,}", field=name)
        return cls(tuple(placed), _check_roles(placed, _string_map(roles, "roles")), _check_pairs(placed, _string_map(pairs, "pairs")))

    @classmethod
    def from_spaces(cls, observation_space: object, action_space: object) -> Self:
        """The usual transition of Gymnasium spaces (of one environment, not of the vector): obs, action, reward, next_obs,
        terminated, truncated; Dict and Tuple spaces become nested names. Needs no Gymnasium import."""
        obs = _space_fields(observation_space)
        return cls.of(
            {
                "obs": obs,
                "action": _space_fields(action_space),
                "reward": Field("float32", cast=True),
                "next_obs": obs,
                "terminated": "bool",
                "truncated": "bool",
            }
        )

    def __iter__(self) -> Iterator[PlacedField]:
        return iter(self.fields)

    def __getitem__(self, name: str) -> PlacedField:
        """The field called ``name``; raises SchemaMismatch that lists the names there are."""
        for field in self.fields:
            if isinstance(name, str) and field.name == name:
                return field
        raise SchemaMismatch(f"there is no field {shown(name)}; the schema has {', '.join(self.names)}", field=shown(name))

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @property
    def row_bytes(self) -> int:
        return sum(field.n_bytes for field in self.fields)

    @property
    def stride(self) -> int:
        """Bytes from one row to the next."""
        return -(-self.fields[-1].end // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES

    @property
    def overlay(self) -> Schema | None:
        """A record of the overlay column: the lap of the row that it belongs to, then the mutable fields; None if there are none."""
        mutable = {f.name: Field(f.dtype, f.shape) for f in self.fields if f.mutable}
        return Schema.of({OVERLAY_LAP: Field("int32"), **mutable}) if mutable else None

    @property
    def fingerprint(self) -> str:
        """16 hex digits over fields, roles and pairs; what is cast or mutable doesn't count, it changes no byte of a row."""
        layout = [[f.name, f.dtype, list(f.shape)] for f in self.fields]
        packed = msgpack.packb([layout, sorted(self.roles.items()), sorted(self.pairs.items())])
        return hashlib.blake2b(packed, digest_size=8).hexdigest()

    def role(self, role: str) -> PlacedField:
        """The field that has ``role``; raises SchemaMismatch by name if none has."""
        if not isinstance(role, str) or role not in self.roles:
            words = f"no field has the role {shown(role)}; name it in Schema.of(..., roles={{{shown(role)}: FIELD}})"
            raise SchemaMismatch(words, role=shown(role))
        return self[self.roles[role]]

    def differences(self, other: Schema) -> str:
        """What ``other`` has that this schema doesn't, and the reverse, in words; empty when they fit."""
        mine = {f.name: f.describe() for f in self.fields}
        theirs = {f.name: f.describe() for f in other.fields}
        words = [f"{name} is missing" for name in mine if name not in theirs]
        words += [f"{name} is extra" for name in theirs if name not in mine]
        words += [f"{name} is {theirs[name]}, not {mine[name]}" for name in mine if name in theirs and mine[name] != theirs[name]]
        if not words and list(mine) != list(theirs):
            words.append(f"the order is {', '.join(theirs)}, not {', '.join(mine)}")
        if not words and (dict(self.roles) != dict(other.roles) or dict(self.pairs) != dict(other.pairs)):
            words.append(f"roles and pairs are {dict(other.roles)}, {dict(other.pairs)}, not {dict(self.roles)}, {dict(self.pairs)}")
        return "; ".join(words)

    def to_wire(self) -> dict[str, object]:
        """Plain lists and maps, also the format of ``--schema FILE`` (JSON)."""
        return {
            "fields": [[f.name, f.dtype, list(f.shape), f.cast, f.mutable] for f in self.fields],
            "roles": dict(self.roles),
            "pairs": dict(self.pairs),
        }

    @classmethod
    def from_wire(cls, wire: object) -> Self:
        """The schema of ``to_wire``; everything is checked. Raises SchemaMismatch naming what is wrong."""
        if not isinstance(wire, Mapping) or not set(wire) <= {"fields", "roles", "pairs"}:
            raise SchemaMismatch("a schema is a map with fields, roles and pairs")
        rows, roles, pairs = wire.get("fields"), wire.get("roles"), wire.get("pairs")
        if not isinstance(rows, list) or len(rows) > MAX_FIELDS:
            raise SchemaMismatch(f"schema: fields must be a list of at most {MAX_FIELDS}")
        specs: dict[str, Field] = {}
        for row in rows:
            match row:
                case [str(name), str(dtype), list(shape), *rest] if len(rest) <= 2 and all(isinstance(c, bool) for c in rest):
                    if name in specs:
                        raise SchemaMismatch(f"field {name!r} stands twice", field=name)
                    specs[name] = Field(dtype, tuple(shape), *rest)
                case _:
                    raise SchemaMismatch(f"schema: field {shown(row)} must be [name, dtype, shape] and, if need be, cast, mutable")
        return cls.of(specs, roles=_string_map(roles, "roles"), pairs=_string_map(pairs, "pairs"))


class _Space(Protocol):
    dtype: object
    shape: tuple[int, ...]


def _flatten(fields: Mapping[str, object], prefix: str = "", depth: int = MOST_NESTED) -> Iterator[tuple[str, object]]:
    if not isinstance(fields, Mapping) or not depth:
        raise SchemaMismatch(f"fields {shown(fields)}: a mapping of names, nested at most {MOST_NESTED} deep")
    for name, spec in fields.items():
        if not isinstance(name, str):
            raise SchemaMismatch(f"field name {shown(name)} is not a string")
        if isinstance(spec, Mapping):
            yield from _flatten(spec, f"{prefix}{name}.", depth - 1)
        else:
            yield prefix + name, spec


def _space_fields(space: object) -> object:
    nested = getattr(space, "spaces", None)
    if isinstance(nested, Mapping):
        return {str(name): _space_fields(part) for name, part in nested.items()}
    if isinstance(nested, list | tuple):
        return {str(index): _space_fields(part) for index, part in enumerate(nested)}
    known = cast(_Space, space)
    try:
        return Field(np.dtype(known.dtype).name, tuple(int(n) for n in known.shape))  # type: ignore[call-overload]
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, SchemaMismatch):
            raise
        raise SchemaMismatch(f"space {shown(space)} has no fixed dtype and shape; describe the field with Schema.of") from error


def _check_roles(placed: list[PlacedField], given: Mapping[str, str] | None) -> dict[str, str]:
    known = {field.name: field for field in placed}
    roles = {role: role for role in ROLES if role in known and _fits(role, known[role])}
    for role, name in (given or {}).items():
        if role not in ROLES:
            raise SchemaMismatch(f"role {role!r} is not one of {', '.join(ROLES)}", role=role)
        if name not in known:
            raise SchemaMismatch(f"role {role!r} names the field {name!r}, which is not there", role=role, field=name)
        if not _fits(role, known[name]):
            words = f"role {role!r} needs one integer a row; field {name!r} is {known[name].describe()}"
            raise SchemaMismatch(words, role=role, field=name)
        roles[role] = name
    return roles


def _fits(role: str, field: PlacedField) -> bool:
    return role != "policy_version" or (not field.shape and "int" in field.dtype)


def _check_pairs(placed: list[PlacedField], given: Mapping[str, str] | None) -> dict[str, str]:
    by_name = {field.name: field for field in placed}
    pairs = dict(given or {})
    for name in by_name:
        head, _, last = name.rpartition(".")
        for after in (f"next_{name}", f"{head}.next_{last}"):
            if after in by_name and name not in pairs:
                pairs[name] = after
    for name, after in pairs.items():
        if name not in by_name or after not in by_name:
            raise SchemaMismatch(f"pair {name!r} -> {after!r}: both must be fields", field=name)
        if by_name[name].describe() != by_name[after].describe():
            raise SchemaMismatch(f"pair {name!r} is {by_name[name].describe()}, {after!r} is {by_name[after].describe()}", field=name)
    return pairs


def _string_map(value: object, what: str) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise SchemaMismatch(f"schema: {what} must map strings to strings")
    return dict(value)
