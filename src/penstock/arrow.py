"""Arrow helpers without pandas: arrays over numpy memory, and Arrow types as text.

pyarrow's own numpy conversion imports pandas if it is installed, which slows the start of every Python
worker. The manifests of the spool contain types as text: `int64`, `decimal128(10, 2)`, `list<item: string>`.

A type whose text cannot be parsed back to the same type is stored as Arrow IPC bytes, so every type can be
stored.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.schema import GEOMETRY_TYPE

Bools = npt.NDArray[np.bool_]


def as_arrow(values: npt.NDArray[Any], arrow_type: pa.DataType) -> pa.Array:
    """An Arrow array without nulls that shares the memory of `values`. Their items must be as wide as
    `arrow_type`.
    """
    return pa.Array.from_buffers(arrow_type, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def bitmap(present: Bools) -> pa.Buffer:
    """A mask as an Arrow bitmap (validity or boolean values)."""
    return pa.py_buffer(np.packbits(present, bitorder="little"))


def as_bools(values: pa.BooleanArray) -> Bools:
    """A boolean array without nulls as a numpy mask."""
    bits = np.frombuffer(values.buffers()[1], np.uint8)
    return np.unpackbits(bits, count=values.offset + len(values), bitorder="little")[values.offset :].view(
        np.bool_
    )


def distinct(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The distinct values in ascending order; the same array if it is already in that form.

    Since numpy 2.3, `np.unique` uses a hash table and takes a second per million values. Row numbers nearly
    always ascend already; checking that takes half a millisecond.
    """
    if bool(np.all(values[1:] > values[:-1])):
        return values
    ordered = np.sort(values)
    return np.compress(np.concatenate([[True], ordered[1:] != ordered[:-1]]), ordered)


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Layout of a column `_exact` or `_unchanged`: per row, a list with at most one entry per table column.
    Nearly every row is null.
    """

    order: npt.NDArray[np.int64]
    """Permutation from column order to row order of the entries."""
    columns: npt.NDArray[np.int64]
    """The table column of each entry, in row order."""
    row_count: int
    offsets: npt.NDArray[np.int32]

    @classmethod
    def plan(cls, row_count: int, rows_by_column: dict[int, npt.NDArray[np.int64]]) -> Ragged:
        rows = np.concatenate(list(rows_by_column.values()))
        columns = np.repeat(
            np.fromiter(rows_by_column, np.int64), [len(rows) for rows in rows_by_column.values()]
        )
        order = np.argsort(rows, kind="stable")
        offsets = np.zeros(row_count + 1, np.int32)
        np.cumsum(np.bincount(rows, minlength=row_count), out=offsets[1:])
        return cls(order, columns[order], row_count, offsets)

    @property
    def filled_rows(self) -> int:
        return int(np.count_nonzero(np.diff(self.offsets)))

    def build(self, arrow_type: pa.DataType, entries: pa.Array) -> pa.Array:
        """Build the column; `entries` are the list elements in row order."""
        buffers = [bitmap(np.diff(self.offsets) > 0), pa.py_buffer(self.offsets)]
        return pa.Array.from_buffers(arrow_type, self.row_count, buffers, children=[entries])


_IPC = "ipc:"
_NAMED: dict[str, pa.DataType] = {
    str(arrow_type): arrow_type
    for arrow_type in (
        *(
            pa.null(),
            pa.bool_(),
            pa.int8(),
            pa.int16(),
            pa.int32(),
            pa.int64(),
            pa.uint8(),
            pa.uint16(),
            pa.uint32(),
            pa.uint64(),
        ),
        *(
            pa.float16(),
            pa.float32(),
            pa.float64(),
            pa.string(),
            pa.binary(),
            pa.large_string(),
            pa.large_binary(),
        ),
        *(pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
        *(pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC")),
        *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
        # GEOMETRY_TYPE is listed because its text does not show the metadata of its field. No other type has
        # any.
        *(pa.month_day_nano_interval(), GEOMETRY_TYPE),
    )
}
_DECIMAL = re.compile(r"decimal(128|256)\((\d+), (-?\d+)\)")
_NESTED = re.compile(r"(list|map|struct)<(.+)>")
_FIELD = re.compile(r"(\w+): (.+)")


@lru_cache(maxsize=4096)
def type_text(arrow_type: pa.DataType) -> str:
    text = str(arrow_type)
    if _readable(text) == arrow_type:
        return text
    return _IPC + base64.b64encode(pa.schema([pa.field("", arrow_type)]).serialize()).decode()


@lru_cache(maxsize=4096)
def parse_type(text: str) -> pa.DataType:
    if text.startswith(_IPC):
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text.removeprefix(_IPC)))).field(0).type
    found = _readable(text)
    if found is None:
        raise ValueError(f"not an arrow type: {text!r}")
    return found


def _readable(text: str) -> pa.DataType | None:
    if text in _NAMED:
        return _NAMED[text]
    if match := _DECIMAL.fullmatch(text):
        make = pa.decimal128 if match[1] == "128" else pa.decimal256
        return make(int(match[2]), int(match[3]))
    match = _NESTED.fullmatch(text)
    return _nested(match[1], list(_parts(match[2]))) if match else None


def _nested(kind: str, parts: list[str]) -> pa.DataType | None:
    if kind == "map":
        types = [_readable(part) for part in parts]
        return pa.map_(*types) if len(types) == 2 and None not in types else None
    fields = [_FIELD.fullmatch(part) for part in parts]
    named = [(match[1], _readable(match[2])) for match in fields if match is not None]
    if len(named) < len(parts) or any(found is None for _, found in named):
        return None
    if kind == "list":
        return pa.list_(named[0][1]) if [name for name, _ in named] == ["item"] else None
    return pa.struct(named)


def _parts(text: str) -> Iterator[str]:
    """Split `text` at the commas that are not in brackets."""
    depth = start = 0
    for at, sign in enumerate(text):
        depth += (sign in "<(") - (sign in ">)")
        if depth == 0 and text.startswith(", ", at):
            yield text[start:at]
            start = at + 2
    yield text[start:]
