"""Rows as people and as programs read them in a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
from replay_server_protocol.schema import Schema

_SHOWN_ELEMENTS = 8

Array = npt.NDArray[np.generic]


def text_lines(seqs: npt.NDArray[np.int64], fields: Mapping[str, Array], schema: Schema) -> Iterator[str]:
    """A line for each row: its seq, then every field; of long ones the first elements and how many there are."""
    shown = {name: _numbers(values, schema[name].dtype) for name, values in fields.items()}
    for place, seq in enumerate(seqs.tolist()):
        yield f"{seq:>8}  " + "  ".join(f"{name} {_short(values[place])}" for name, values in shown.items())


def json_lines(seqs: npt.NDArray[np.int64], fields: Mapping[str, Array], schema: Schema) -> Iterator[str]:
    """One JSON object a row, ``{"seq": …, "fields": {"FIELD": …}}``; NaN and infinities as the texts "nan", "inf" and "-inf"."""
    shown = {name: _numbers(values, schema[name].dtype) for name, values in fields.items()}
    for place, seq in enumerate(seqs.tolist()):
        yield json.dumps({"seq": seq, "fields": {name: _plain(values[place].tolist()) for name, values in shown.items()}}, allow_nan=False)


def _numbers(values: Array, dtype: str) -> Array:
    if dtype != "bfloat16":
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)  # the upper half of a float32


def _short(value: Array) -> str:
    elements = np.atleast_1d(value).reshape(-1)
    texts = [f"{x:.5g}" if isinstance(x, float) else str(x) for x in elements[:_SHOWN_ELEMENTS].tolist()]
    if not np.ndim(value):
        return texts[0]
    more = f" … {elements.size:,} elements" if elements.size > _SHOWN_ELEMENTS else ""
    return f"[{' '.join(texts)}{more}]"


def _plain(value: object) -> object:
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
